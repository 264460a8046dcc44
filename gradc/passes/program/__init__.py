"""Program -> Program."""
