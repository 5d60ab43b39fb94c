"""Pickles of version 0.1.0 look for `GradScaler` here."""

from mezzo.pytorch.grad_scaler import GradScaler as GradScaler
