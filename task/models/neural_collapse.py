"""The head regularizer of FLUTE: the distance of heads from neural collapse."""

import torch
from torch import Tensor


def neural_collapse(heads: Tensor, classes: Tensor, local: bool = False) -> Tensor:
    """Return NC_i of each head: its distance from the simplex of its classes.

    NC_i(H) = ‖ HᵀH / ‖HᵀH‖_F − 1/√(m−1) u_i u_iᵀ ⊙ (I_m − 1/m 11ᵀ) ‖_F, with
    H ∈ R^{k×m} the transpose of the weights and u_i the classes (FLUTE, section 7.2).
    Its mean over the clients is the paper's Global NC2. Client and server minimise it.

    Parameters
    ----------
    heads : Tensor, shape (n, m, k)
        Weights of n linear heads: m classes, k features.
    classes : Tensor of bool, shape (n, m)
        Classes that each client has.
    local : bool, default False
        Replace m in the simplex by the client's number of classes. The mean is then
        the paper's Averaged Local NC2 (appendix C.2). The simplex of one class or none
        is 0.
    """
    m = heads.shape[-2]
    gram = heads @ heads.mT
    # A head of zeros has the normalised Gram matrix 0, with gradient 0.
    norms = torch.linalg.matrix_norm(gram).clamp(min=torch.finfo(gram.dtype).tiny)
    gram = gram / norms[:, None, None]
    u = classes.to(heads.dtype)
    sides = u.sum(1).clamp(min=1) if local else u.new_full((len(u),), m)
    identity = torch.eye(m, dtype=heads.dtype, device=heads.device)
    simplex = identity - 1 / sides[:, None, None]
    scale = (sides - 1).clamp(min=1).rsqrt()[:, None, None]
    target = scale * (u[:, :, None] * u[:, None, :]) * simplex
    distance: Tensor = torch.linalg.matrix_norm(gram - target)
    return distance


def step(heads: Tensor, classes: Tensor, step_size: float) -> Tensor:
    """Return heads after one gradient step on the mean of NC_i.

    This is the server's step of FLUTE, algorithm 2, on R = Σ_i NC_i(H_i) over the
    sampled clients. As in the authors' code, R is divided by their number.

    Parameters
    ----------
    heads, classes : Tensor
        See `neural_collapse`.
    step_size : float
        Learning rate of the step.
    """
    heads = heads.detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(neural_collapse(heads, classes).mean(), heads)
    return heads.detach() - step_size * gradient
