"""Cases of one test: each is run and named, whatever became of the others."""

from __future__ import annotations

import inspect

import pytest

from tests.cases import cases, selection


def test_each_is_run_with_each_and_with_the_fixtures():
    """Would catch a case that is left out, and a name of a case that pytest takes for a fixture."""
    calls = []

    @cases("a", [1, 2])
    @pytest.mark.slow
    @cases(("b", "c"), [(3, 4), (5, 6)])
    def whole(a, b, c, cluster):
        calls.append((a, b, c, cluster))

    assert list(inspect.signature(whole).parameters) == ["cluster"]
    assert [mark.name for mark in whole.pytestmark] == ["slow"]
    whole(cluster="four")
    assert calls == [(a, b, c, "four") for a in (1, 2) for b, c in ((3, 4), (5, 6))]


def test_a_case_that_fails_is_named_and_hides_no_other():
    """Would catch a loop that ends with its first failure, and a failure of which nobody knows the case."""
    calls = []

    @cases("n", range(5))
    def whole(n):
        calls.append(n)
        assert n not in (1, 3)
        if n == 4:
            pytest.fail("four")

    with pytest.raises(BaseExceptionGroup, match="3 of 5 cases") as told:
        whole()
    assert calls == [0, 1, 2, 3, 4]
    assert [failure.__notes__ for failure in told.value.exceptions] == [["case: n=1"], ["case: n=3"], ["case: n=4"]]


def test_one_failure_is_raised_as_it_is():
    """Would catch a group around the one error that a reader looks for."""

    @cases(("fn", "text"), [(max, "a"), (min, "b" * 200)])
    def whole(fn, text):
        assert fn is max

    with pytest.raises(AssertionError) as told:
        whole()
    assert told.value.__notes__[0].startswith("case: fn=min, text='bbb")
    assert told.value.__notes__[0].endswith("bbb...")


def test_a_skip_is_no_failure():
    """Would catch a case that cannot run here and turns the others red."""

    @cases("n", [1])
    def whole(n):
        pytest.skip("not here")

    with pytest.raises(pytest.skip.Exception):
        whole()


def test_no_cases_and_rows_of_another_length_are_refused():
    """Would catch a test that passes since there is nothing to test, and a value without a name."""
    with pytest.raises(ValueError, match="a test of each a, b has no cases"):
        cases(("a", "b"), [])(lambda a, b: None)()
    with pytest.raises(ValueError, match="shorter"):
        cases(("a", "b"), [(1,)])(lambda a, b: None)()


def test_what_is_dear_is_loaded_when_the_test_runs():
    """Would catch a collection that waits for every deck and every problem."""
    calls, loads = [], []

    @cases("n", lambda: loads.append("loaded") or (1, 2))
    def whole(n):
        calls.append(n)

    assert loads == []
    whole()
    assert (loads, calls) == (["loaded"], [1, 2])


def test_a_selection_has_every_case_and_marks_all_but_the_kept_ones():
    """Would catch a case that no run has, and a value that `make test` no longer has."""
    made = selection([("a", 1), ("b", 2)], "ab", [1, 2])
    assert [case.values for case in made] == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]
    assert [[mark.name for mark in case.marks] for case in made] == [[], ["rest"], ["rest"], []]
    with pytest.raises(ValueError, match="only in the rest: \\[2\\]"):
        selection([("a", 1), ("b", 1)], "ab", [1, 2])
    with pytest.raises(ValueError, match=r"no such cases: \[\('c', 1\)\]"):
        selection([("c", 1)], "ab", [1, 2])


def test_of_three_axes_a_selection_has_each_pair_of_values_and_only_cases_that_there_are():
    """Would catch a strategy that no run has with some precision, and a pair that only a case has that is refused."""
    made = selection(
        [("a", 1, True), ("b", 2, False), ("c", 3, True)], "abc", [1, 2, 3], [True, False],
        there_is=lambda letter, number, whole: (letter, number) != ("a", 2),
    )  # fmt: skip
    values = [case.values for case in made]
    assert 8 <= len(values) < 16
    assert {case[:2] for case in values} == {(a, n) for a in "abc" for n in (1, 2, 3)} - {("a", 2)}
    assert {case[::2] for case in values} == {(a, whole) for a in "abc" for whole in (True, False)}
    assert {case[1:] for case in values} == {(n, whole) for n in (1, 2, 3) for whole in (True, False)}
