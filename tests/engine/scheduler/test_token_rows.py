"""Results and news by column say what they would row by row."""

from __future__ import annotations

from octavo.engine.scheduler.step_plan import NO_TOKEN, RowTokens, StepResult, TokenRows


def test_a_column_of_tokens_reads_as_rows() -> None:
    rows = TokenRows([5, NO_TOKEN, 7], [RowTokens((9,)), RowTokens(())])
    expected = [RowTokens((5,)), RowTokens(()), RowTokens((7,)), RowTokens((9,)), RowTokens(())]
    assert list(rows) == expected
    assert len(rows) == 5
    assert [rows[index] for index in range(5)] == expected
    assert rows[1:4] == tuple(expected[1:4])


def by_column(plan, result):
    """The same result, with the decode rows' tokens as a column."""
    num_decode = len(plan.decode_rows)
    ids = [row.token_ids[0] if row.token_ids else NO_TOKEN for row in result.rows[:num_decode]]
    return StepResult(rows=TokenRows(ids, result.rows[num_decode:]))


def play(drive, request_of, *, columns: bool):
    """Streams and plans of requests of which some stop early, in a pool that is too small."""
    driver = drive(depth=1, limits={"num_pages": 12})
    for number in range(8):
        driver.add(request_of(f"r{number}", 3 + number % 4, 6 + number, eos=[number % 3]))
    news = []
    for turn in range(400):
        plan = driver.plan()
        if turn == 9:
            driver.cancel("r1")
        if len(driver.in_flight) > 1 or (plan is None and driver.in_flight):
            if columns:
                first, result = driver.in_flight[0]
                driver.in_flight[0] = (first, by_column(first, result))
            news.append(sorted((n.request.request_id, n.new_token_ids) for n in driver.commit()))
        driver.scheduler.check_integrity()
        if not driver.scheduler.has_work:
            break
    driver.check_ends()
    plans = [(p.page_updates, p.preempted, p.decode_rows.slots.tolist()) for p in driver.plans]
    return news, driver.streams, plans


def test_tokens_by_column_are_committed_as_rows_are(drive, request_of) -> None:
    assert play(drive, request_of, columns=True) == play(drive, request_of, columns=False)
