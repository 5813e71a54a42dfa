"""Operations and the framework that dispatches them."""
