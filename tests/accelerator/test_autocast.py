"""Autocast casts what it casts on CUDA."""

import torch
from torch.nn.functional import layer_norm, linear, softmax


def test_the_ops_are_those_of_cuda(device):
    """torch holds CUDA's lists also where it is built without CUDA."""

    def registered(key):
        return {
            op
            for op in torch._C._dispatch_get_all_op_names()
            if torch._C._dispatch_has_kernel_for_dispatch_key(op, key)
        }

    cuda, ours = registered("AutocastCUDA"), registered("AutocastPrivateUse1")
    assert len(cuda) > 100
    # A build with CUDA and its next versions have more: no test of ours calls them.
    cuda -= {"aten::_cudnn_rnn", "aten::linalg_matrix_sqrth"}
    assert cuda ^ ours == {"aten::cudnn_convolution", "aten::cudnn_convolution_transpose", "aten::binary_cross_entropy"}


def test_products_are_cast_down_and_sums_up(device):
    x = torch.randn(4, 4, device="standin", requires_grad=True)
    with torch.autocast("standin", dtype=torch.bfloat16):
        low = linear(x, x)
        assert low.dtype == torch.bfloat16
        assert softmax(low, -1).dtype == layer_norm(low, (4,)).dtype == low.float().sum().dtype == torch.float32
        assert torch.cat([low, x]).dtype == torch.float32
    low.float().sum().backward()
    assert x.grad.dtype == torch.float32
