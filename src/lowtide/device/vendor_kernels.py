"""Kernels of one vendor's libraries, by the names of their operators: what their schemas do not say."""

# They write running statistics that their schemas call read-only.
BATCH_NORMS = ("aten.cudnn_batch_norm", "aten.miopen_batch_norm")
# What they return as reserve or workspace belongs to the one run that filled it.
RECURRENT = ("aten._cudnn_rnn", "aten.miopen_rnn")
