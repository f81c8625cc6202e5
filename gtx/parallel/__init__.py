"""Runs one program under many plans: ranks, the row exchange, the plan's compiler and its executor."""
