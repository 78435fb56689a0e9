from tests.infer.conftest import babbler, stage  # noqa: F401  (fixtures)
