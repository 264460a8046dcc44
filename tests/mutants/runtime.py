"""x"""
MUTANTS = ()
