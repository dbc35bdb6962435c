"""Operations on many small models at once."""
