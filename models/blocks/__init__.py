"""What layers are made of, an ingredient a file.

A block is a frozen, hashable dataclass: the numbers that one layer differs from another by. It says
in one place

- its parameters (`parameters`): a Flax module of `models.parameters.param`s, each with its shape,
  logical axes, initial values, the dimensions that a product contracts, and the checkpoint tensors
  that it is made of, by Hugging Face's names and by llama.cpp's (`models.tensor_layouts`);
- what a layer keeps of its tokens (`cache`, of a mixer): a `models.cache_spec.CacheSpec`;
- what it computes (`apply`): a pure function of weights and tokens;
- how many numbers a token's products multiply with (`num_weights`), for estimates.

`layer.LayerSpec` puts a mixer, a feed-forward and norms together. Layers with equal specs share one
traced function.
"""
