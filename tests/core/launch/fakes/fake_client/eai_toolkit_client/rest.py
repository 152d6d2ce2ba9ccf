"""The client's error."""


class ApiException(Exception):
    def __init__(self, status: int | None = None, reason: str = "", after: bool = False, always: bool = False) -> None:
        super().__init__(f"({status}) Reason: {reason}")
        self.status, self.after, self.always = status, after, always
