"""Learned heads: small networks that draft from hidden states of the target.

* `base.Head` is the interface, `base.FeatureHead` drafts level by level and `base.BlockHead` all levels in one pass.
  `base.TargetParts` is what a head shares with its target, `config.HeadConfig` its sizes and variants.
* One file per family: `eagle`, `peagle`, `dflash` (and DSpark; `dflash2` and `xpress` hold their additions), `medusa`,
  `mtp`, `gemma4`, of the parts in `layers`.
* `passes.HeadPasses` decodes with heads that draft level by level, `block_passes.BlockPasses` with those that draft in
  one pass, in PyTorch or by `native_passes`; `native_plans` has the blueprints of heads.
* `folders.read_head` and `folders.write_head` read every layout of `layouts` (one file each) and write our own;
  `writers` exports heads for vLLM and SGLang. `calibration` reads what training measured beside a head.
* `shipped` holds the heads of this package.

Invariants: parameters have the names of the speculators layout. What a head shares with its target is set by `bind`,
and is neither saved nor trained. Layers are the same code in training and decoding, which differ in `Attend` only.
A folder is refused before its weights are used if names, shapes or values do not fit.

The package uses models, weights and sampling. It is used by drafters, loading, `train` and `lab`.
"""
