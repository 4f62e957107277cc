"""Which class of work an operator is: ops of one class reach about the same share of a device's peak."""

from functools import cache

# By class the words that an operator's name holds, as a whole between underscores; the first class that fits counts.
_WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("elementwise", ("masked",)),  # masked_fill reads
    ("attention", ("attention",)),
    ("conv", ("convolution", "conv", "conv1d", "conv2d", "conv3d")),
    ("matmul", ("mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "matmul", "addmv", "mv", "dot", "einsum")),
    ("gather", ("embedding", "index", "gather", "scatter", "take", "put", "nonzero", "topk", "sort", "unique", "roll")),
    ("random", ("bernoulli", "dropout", "rand", "randn", "normal", "uniform", "randint", "multinomial", "exponential")),
    ("norm", ("norm",)),
    ("softmax", ("softmax", "logsumexp")),
    ("pool", ("pool1d", "pool2d", "pool3d", "upsample")),
    ("reduction", ("sum", "mean", "amax", "amin", "max", "min", "var", "std", "prod", "any", "all", "cumsum", "cumprod",
                   "argmax", "argmin", "loss", "aminmax")),
    ("fill", ("fill", "zero", "zeros", "ones", "full", "empty", "arange", "eye")),
    ("copy", ("clone", "copy", "cat", "stack", "pad", "repeat", "flip", "contiguous", "tril", "triu")),
    ("transcendental", ("gelu", "silu", "exp", "exp2", "expm1", "tanh", "sigmoid", "erf", "log", "log1p", "log2", "pow",
                        "sin", "cos", "softplus", "mish", "elu", "logsigmoid", "hardswish", "atan2", "logaddexp")),
)  # fmt: skip
COMPUTE = ("attention", "conv", "matmul")


@cache
def class_of(op_name: str) -> str:
    """``aten.native_layer_norm_backward.default -> "norm"``; what is not known is ``elementwise``."""
    words = {word for word in op_name.split(".")[1].split("_") if word} if "." in op_name else {op_name}
    for name, known in _WORDS:
        if not words.isdisjoint(known):
            return name
    return "elementwise"
