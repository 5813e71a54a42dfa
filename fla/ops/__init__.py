"""Operations and the framework that dispatches them."""

TYPE_CHECKING = False
if not TYPE_CHECKING:  # a type checker would take any name for one that exists

    def __getattr__(name):
        from fla.utils.owners import missing

        raise missing(__name__, name)
