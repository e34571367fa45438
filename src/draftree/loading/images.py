"""What a loaded model needs to read images: its processor, and its whole model beside a text decoder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from draftree.core.errors import ConfigurationError, DraftreeError, UnsupportedModelError, import_extra
from draftree.core.files import JsonError, read_json
from draftree.loading.loaded import LoadedModel
from draftree.loading.transformers_model import config_of, first_line, read_model
from draftree.models.base import LanguageModel
from draftree.models.images import ImageProcessor, ImageReader, PromptProcessor
from draftree.models.native.model import NativeModel
from draftree.models.torch.hf import HFModel
from draftree.models.torch.hf_cache import CachedModel
from draftree.models.torch.images import OwnPassReader, Reading

VISION = "vision_config"  # key of the configurations of image-text models


def image_processor_of(
    loaded: LoadedModel, tokenizer: Any, *, trust_remote_code: bool = False
) -> ImageProcessor | None:
    """Return the processor of prompts with images, which is loaded for the first of them; None for a model of text.

    Args:
        loaded: the model.
        tokenizer: what the caller gave as tokenizer, which may be a processor of transformers.
        trust_remote_code: whether Python code in the model's folder may run.
    """
    if not _has_vision(loaded):
        return None

    def load() -> PromptProcessor:
        processor = tokenizer
        if not reads_images(tokenizer):
            if loaded.folder is None:
                raise ConfigurationError("images need the model's processor: give it as tokenizer=")
            processor = load_processor(loaded.folder, trust_remote_code=trust_remote_code)
        if isinstance(loaded.model, HFModel | CachedModel) and VISION in loaded.model.model.config.to_dict():
            config = loaded.model.model.config
        else:
            assert loaded.folder is not None, "other models are loaded from a folder"
            config = config_of(loaded.folder, trust_remote_code=trust_remote_code)
        return PromptProcessor(processor, getattr(config, "image_token_id", None))

    return ImageProcessor(load)


def reads_images(tokenizer: Any) -> bool:
    """Return whether a tokenizer object is a processor that reads images."""
    return getattr(tokenizer, "image_processor", None) is not None


def image_reader_of(loaded: LoadedModel, *, trust_remote_code: bool = False) -> ImageReader | None:
    """Return what opens slots on prompts with images; None for a model of text."""
    target = loaded.model
    if not isinstance(target, HFModel | CachedModel | NativeModel) or not _has_vision(loaded):
        return None
    return OwnPassReader(target, partial(_reading, loaded, target, trust_remote_code))


def _has_vision(loaded: LoadedModel) -> bool:
    target = loaded.model
    if isinstance(target, HFModel | CachedModel) and VISION in target.model.config.to_dict():
        return True
    try:
        return loaded.folder is not None and VISION in read_json(loaded.folder / "config.json")
    except (FileNotFoundError, NotADirectoryError, JsonError):
        return False


def _reading(loaded: LoadedModel, target: LanguageModel, trust_remote_code: bool) -> Reading:
    """Return the model that reads images: the target, or the whole model of which the target is the text decoder."""
    if isinstance(target, HFModel | CachedModel) and VISION in target.model.config.to_dict():
        return target
    from transformers import AutoModelForImageTextToText

    assert loaded.folder is not None, "other models are loaded from a folder"
    model = read_model(
        loaded.folder,
        target.dtype,
        target.device,
        trust_remote_code=trust_remote_code,
        reader=AutoModelForImageTextToText,
    )
    if getattr(model.config.get_text_config(), "cross_attention_layers", None):
        raise UnsupportedModelError(
            f"some layers of '{loaded.name}' attend to the images themselves, and slots hold what belongs to tokens: "
            "give prompts without images"
        )
    model.eval().requires_grad_(False)
    if isinstance(target, CachedModel):
        return CachedModel(model)
    try:
        return HFModel(model)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"'{loaded.name}' reads no images: {error}") from error


def load_processor(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """Return the processor of transformers of a folder, without those of video and sound where a package is missing.

    Raises:
        ConfigurationError: there is none, or a package is missing.
    """
    import_extra("images", "images need", error=ConfigurationError)
    from transformers import AutoProcessor

    try:
        try:
            processor = AutoProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except ImportError:
            processor = _for_images(folder, trust_remote_code=trust_remote_code)
    except DraftreeError:
        raise
    except Exception as error:  # the libraries raise various exceptions for damaged files
        raise ConfigurationError(f"the image processor of '{folder}' cannot be read: {first_line(error)}") from error
    if getattr(processor, "image_processor", None) is None:
        raise ConfigurationError(f"'{folder}' has no image processor: give prompts without images")
    return processor


def _for_images(folder: Path, *, trust_remote_code: bool) -> Any:
    """Return a processor for text and images of a class whose processors of video or sound cannot be loaded."""
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer, ProcessorMixin

    settings, _ = ProcessorMixin.get_processor_dict(folder, local_files_only=True)
    name = str(settings.get("processor_class"))
    family = getattr(transformers, name)
    if not (isinstance(family, type) and issubclass(family, ProcessorMixin)):
        raise ConfigurationError(
            f"{name} needs the Python package 'torchvision', which is not installed: run pip install torchvision"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    images = AutoImageProcessor.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    parts: dict[str, Any] = {"image_processor": images, "tokenizer": tokenizer}
    others = {attribute: parts.get(attribute) for attribute in family.get_attributes()}

    def check(self: Any, argument_name: str, argument: Any) -> Any:
        return None if argument is None else family.check_argument_for_proper_class(self, argument_name, argument)

    kind: Any = type(name, (family,), {"check_argument_for_proper_class": check})
    known = {
        key: settings[key] for key in settings if key in family.__init__.__code__.co_varnames and key not in others
    }
    return kind(**others, **{"chat_template": tokenizer.chat_template} | known)
