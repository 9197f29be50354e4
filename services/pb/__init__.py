"""Generated from proto/ by `make proto`; only this line is kept in the repository."""
