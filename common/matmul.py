"""torch's global precision of float32 matrix products, read by whichever switches the process has used."""

import torch


def old_precision() -> str | None:
    """None if the process has used torch's newer switches, after which torch refuses to read the older one."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def matmul_precision() -> str:
    return old_precision() or str(torch.backends.cuda.matmul.fp32_precision)
