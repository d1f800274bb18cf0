"""kla_discretise: the decay and noise of one token from those of continuous time."""
from core import autodiff as ad

EQUATION = """\
dt = softplus(delta) + 1e-7;  c = exp(lambda_log);  p = max(process_noise, 1e-7);  abar = exp(-c dt);
ou: pbar = p/(2c) (1 - exp(-2 c dt));  zoh: pbar = p dt.   All (M,S).

Resolution: p enters linearly (code), not squared (paper eq. 8): it is a diffusion variance."""

INPUTS = {"delta": "MS", "lambda_log": "MS", "process_noise": "MS"}
OUTPUTS = {"abar": "MS", "pbar": "MS"}


def evaluate(x, p):
    dt = ad.softplus(x["delta"]) + 1e-7
    c = ad.exp(x["lambda_log"])
    noise = ad.floor_at(x["process_noise"], 1e-7)
    if p["mode"] == "zoh":
        pbar = noise * dt
    else:
        pbar = noise / (2 * c) * -ad.expm1(-2 * c * dt)
    return {"abar": ad.exp(-c * dt), "pbar": pbar}


SIZES = dict(M=12, S=8)
OPTIONS = {"mode": "ou"}


def draw(d, n, o):
    cell = (n.M, n.S)
    x = {"delta": d.normal(*cell), "lambda_log": d.normal(*cell),
         "process_noise": d.uniform(-0.02, 0.1, *cell)}
    return x, {"mode": o.mode}


CASES = {f"kla_discretise_{mode}": dict(mode=mode,
                                        note="process_noise below its 1e-7 floor in places")
         for mode in ("ou", "zoh")}
