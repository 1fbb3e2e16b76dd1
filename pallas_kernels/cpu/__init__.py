"""What serves CPUs alone; who comes for a TPU or a GPU need not read on.

- `block_quantized_linear`: float32 products of a checkpoint's own blocks, for few rows.
- `int8_split_linear`: float32 products as int8 products of digits, on a matrix unit.
- `native_int8_linear`: int8 products of one and two rows.
- `eigen_linear`: products by Eigen in a program whose others are YNNPACK's.
- `bounded_argmax`: greedy tokens without most logits.
- `native_attention`: decode rows' attention as one native function; `ragged_paged_attention/xla.py`
  calls it.
- `product_library`, `tune_products`: which of these a machine is to take, and how that is measured.

Each weight is a `linear_weight.LinearWeight`, so models know none of them. Which program reads
which is `engine/execution/weights/weight_variants.py`'s to say.
"""
