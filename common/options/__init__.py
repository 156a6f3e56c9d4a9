"""How an option is declared, checked, printed, and written into recipes."""
