"""Sentence Transformers' process: prints its texts a second, the vectors go into the folder.

In an environment with torch and sentence-transformers, which has no Octavo.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer, models

BATCH = 32

folder = Path(sys.argv[1])
torch.set_num_threads(1)
texts = json.loads((folder / "texts.json").read_text())
transformer = models.Transformer(str(folder / "model"), max_seq_length=512)
if transformer.tokenizer.pad_token is None:
    transformer.tokenizer.pad_token = transformer.tokenizer.eos_token
pooling = models.Pooling(transformer.get_word_embedding_dimension(), pooling_mode="lasttoken")
model = SentenceTransformer(modules=[transformer, pooling, models.Normalize()], device="cpu")
model.encode(texts[:BATCH], batch_size=BATCH)
begun_s = time.perf_counter()
vectors = model.encode(texts, batch_size=BATCH)
seconds = time.perf_counter() - begun_s
np.save(folder / "torch.npy", vectors)
print(len(texts) / seconds)
