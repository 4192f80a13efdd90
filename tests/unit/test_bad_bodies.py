"""Every field of every body with every kind of wrong value: refused by the parser, by name, whatever it is."""

import pytest

from bench.bad_bodies import VALUES, bad_bodies, bodies
from gateway_proc.errors import ApiError
from gateway_proc.requests import BodyReader

READER = BodyReader(2**26)


@pytest.mark.soak
@pytest.mark.parametrize("path", bodies())
def test_wrong_values_are_refused_by_name(path: str) -> None:
    wrong = 0
    fields = set()
    for bad in bad_bodies(path):
        fields.add(bad.field)
        try:
            READER.parse(bad.body, bodies()[path])
        except ApiError as error:
            assert error.status == 400
            if bad.wrong and bad.field:
                where = error.param or ""
                assert where and (where.startswith(bad.field) or bad.field.startswith(where)), (bad, error.message)
        else:
            assert not bad.wrong, f"{bad.field} = {bad.value} was taken"
        wrong += bad.wrong
    assert set(bodies()[path].model_json_schema()["properties"]) <= fields, "no field is left out"
    assert wrong > len(fields) * len(VALUES) // 2
