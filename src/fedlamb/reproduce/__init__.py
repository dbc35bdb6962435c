"""The paper's figures and its theory, reproduced."""
