"""Models of transformers, run by PyTorch.

* `hf.HFModel` is a causal model with our attention and slots; `hf_cache` serves families whose attention cannot be
  replaced, with chains only and one sequence per pass.
* `attention` packs the rows of all sequences into one dimension without padding. Its attention and mask functions are
  registered with transformers, and a context variable marks our passes: other calls get transformers' own attention.
* `static` runs passes of fixed shapes, which a CUDA graph can replay; padding goes to an unused position after each
  slot. `tree_attention` is their Triton kernel, which reads visible keys only. `growth` drafts all levels of trees in
  such a pass.
* `inspection`, `layers` and `packing` read and change a model of transformers; `seq2seq` has encoder-decoder models.

Hazard: bfloat16 and float16 passes of one row are padded to two where the device multiplies bfloat16 natively, because
one row takes other kernels.
"""
