"""Programs as text: what is written is read back the same, and a broken file gets its line, the grid and the reason."""

from __future__ import annotations

import pytest

from cdp_repro.schedule import Program, Schedule, ScheduleError
from cdp_repro.schedule.program_text import FIRST_LINE, read_program, write_program

NINES = "9" * 5000
"""More digits than Python turns into a number."""

SETTINGS = [
    ("cdp_v2", 2, 2, {"placement": "replicated"}),
    ("cdp_v1", 3, 3, {"placement": "zero", "replicas": 2}),
    ("cdp_v2", 3, 6, {"placement": "model_parallel"}),
    ("cdp_v2", 2, 2, {"placement": "pipeline", "accumulate": 2}),
    ("dp", 3, 4, {"placement": "pipeline", "ranks": 2, "pipeline_schedule": "gpipe"}),
    ("dp", 2, 2, {"placement": "zero", "collectives": True}),
    ([[1, 1], [2, 0]], 2, 2, {}),
    ("accumulation", 16, 2, {"micro_batches": 1}),
    ("gpipe", 8, 2, {"placement": "pipeline", "ranks": 2, "micro_batches": 1}),
    ("cdp_v2", 2, 3 * 2, {"placement": "replicated", "gradient_bytes": (2**20,) * 5 + (2**24,)}),
]


def program(mode="cdp_v2", workers=2, stages=2, **choices):
    return Program(Schedule.build(mode, workers, stages, **choices))


@pytest.mark.parametrize(("mode", "workers", "stages", "choices"), SETTINGS)
def test_what_is_written_is_read_back(mode, workers, stages, choices):
    written = program(mode, workers, stages, **choices)
    read = read_program(write_program(written))
    assert write_program(read) == write_program(written)
    assert read.schedule == written.schedule
    for first_step in range(3):
        for steps in range(1, 6):
            ours, theirs = ([[s.number, *sorted(map(str, s.actions))] for s in each.slots(steps, first_step)]
                            for each in (written, read))  # fmt: skip
            assert ours == theirs


def test_a_tab_parts_the_slot_from_the_action():
    text = write_program(program(placement="zero"))
    assert write_program(read_program(text.replace("  0  F", "\t0\tF"))) == text


def test_notes_and_blank_lines_say_nothing():
    text = write_program(program(placement="zero"))
    noted = text.replace("\nrank 0\n", "\n\n// by hand\nrank 0   // the owner of stage 0\n")
    assert noted != text and write_program(read_program(noted)) == text


def refused(text):
    with pytest.raises(ScheduleError) as error:
        read_program(text)
    said = str(error.value)
    assert len(said.splitlines()) < 40, "one screen"
    return said


def edited(placement, old, new, **choices):
    """Return the text with its first `old` replaced, and the number of that line."""
    text = write_program(program(placement=placement, **choices))
    assert old in text
    return text.replace(old, new, 1), text[: text.index(old)].count("\n") + 1


def test_a_lost_sum_is_refused():
    text, _ = edited("replicated", "  4  A g1[0:2]: g1[0:1]! g1[1:2]! -> g1[0:2]\n", "")
    said = refused(text)
    assert "U1@v1: g1[0:2] is not on rank 0" in said and said.startswith("line ") and "worker 0" in said


def test_a_stale_read_is_refused():
    old = "F1.m2@v1: x1.m2! p1@v1 b1.w0! -> s1.m2 d1.m2 b1.w0"
    text, line = edited("replicated", old, old.replace("@v1", "@v0"))
    assert refused(text).startswith(f"line {line}: slot 5, rank 0, F1.m2@v0: its rule asks for version 1")


def test_an_unknown_value_is_refused():
    text, line = edited("replicated", "  0  F0.m0@v0: p0@v0 b0.w0!", "  0  F0.m0@v0: q0@v0 b0.w0!")
    assert refused(text).startswith(f"line {line}: not a value: 'q0@v0'")


def test_an_unknown_action_is_refused():
    text, line = edited("replicated", "  0  F0.m0@v0: p0@v0", "  0  G0.m0@v0: p0@v0")
    assert refused(text).startswith(f"line {line}: not an action")


def test_ranks_that_wait_for_each_other_are_refused():
    """Each of two ranks would send what the other adds only after it has added itself."""
    lines = write_program(program(placement="replicated")).split("\n")
    fill = lines.index("fill 1")
    send = lines.index("  3  S g0[0:1]>1: g0[0:1] ->", fill)
    del lines[send]
    first = lines.index("  5  F1.m2@v1: x1.m2! p1@v1 b1.w0! -> s1.m2 d1.m2 b1.w0", fill)
    lines[first:first] = ["  5  A g0[0:2]: g0[0:1] g0[1:2]! -> g0[0:2]", "  5  S g0[0:1]>1: g0[0:1]! ->"]
    send = lines.index("  5  S g0[1:2]>0: g0[1:2] ->", fill)
    lines[send : send + 2] = ["  5  A g0[0:2]: g0[0:1]! g0[1:2] -> g0[0:2]", "  5  S g0[1:2]>0: g0[1:2]! ->"]
    said = refused("\n".join(lines))
    assert f"line {first + 1}: slot 5, rank 0, A g0[0:2]: it waits for g0[1:2], and ranks wait for each other" in said


def test_other_ranks_than_the_header_says_are_refused():
    text, line = edited("replicated", "  2  S g1[0:1]>1: g1[0:1] ->", "  2  S g1[0:1]>5: g1[0:1] ->")
    assert refused(text).startswith(f"line {line}: slot 2, rank 0, S g1[0:1]>5: placement replicated")
    assert "in mode cdp_v2 has only ranks 0 to 1" in refused(text)
    text, _ = edited("replicated", "workers = 2\nstages = 2", "workers = 1\nstages = 2")
    assert "has runs from the steps [0, 1]: placement replicated with workers=1" in refused(text)


@pytest.mark.parametrize(
    ("slot", "action"), [("666666666", "U1@v1: p1@v0! g1[0:2]! -> p1@v1"), ("0", "F0.m0@v0: p0@v0 b0.w0! -> s0.m0")]
)
def test_a_drain_has_slots_of_its_own(slot, action):
    """A slip of the pen must neither take all memory nor be passed over."""
    text, line = edited("replicated", "\ndrain after 1\nrank 0\n", f"\ndrain after 1\nrank 0\n  {slot}  {action}\n")
    assert refused(text) == f"line {line + 3}: drain after 1 has the slots 3 to 58"


def test_the_line_is_that_of_the_piece_at_fault():
    """A run that ends early has a text of its own for slots that a longer run has, too."""
    text = write_program(program(placement="replicated"))
    drain = text.index("\ndrain after 1\n")
    lost = "  3  B0.m0@v0: s0.m0! d0.m0! p0@v0 -> g0[0:1]\n"
    reads = text.index("  3  S g0[0:1]>1: g0[0:1] ->\n", drain)
    at = text.index(lost, drain)
    said = refused(text[:at] + text[at + len(lost) :])
    assert said.startswith(f"line {text[:reads].count(chr(10))}: slot 3, rank 0, S g0[0:1]>1: ")


@pytest.mark.parametrize(("run", "steps"), [(0, 1), (0, 2), (1, 1)])
def test_what_a_drain_leaves_undone_names_the_drain(run, steps):
    text = write_program(program(placement="replicated"))
    drain = text.index(f"\ndrain after {steps}\n", text.index(f"run from step {run}\n"))
    at = text.index("  U", drain)
    begin = text.rindex("\n", 0, at) + 1
    said = refused(text[:begin] + text[text.index("\n", at) + 1 :])
    assert said.startswith(f"run from step {run}, drain after {steps}: the program ends with ")


@pytest.mark.parametrize("stop", [2000, 222222222])
def test_a_sum_of_many_micro_batches_is_refused_in_a_few_words(stop):
    text, _ = edited("replicated", "A g1[0:2]: g1[0:1]! g1[1:2]! ->", f"A g1[0:2]: g1[0:1]! g1[2:{stop}]! ->")
    said = refused(text)
    assert f"it must read g1[0:1], g1[1:2], not g1[0:1], g1[2:{stop}]: a sum is of micro-batches in their order" in said


@pytest.mark.parametrize("staleness", [20000, 2000000000])
def test_runs_that_a_great_staleness_would_need_are_not_listed(staleness):
    text, _ = edited("single_device", 'mode = "cdp_v2"', f"mode = [[1, 1], [{staleness}, 0]]")
    assert f"needs one from each of 0 to {staleness}" in refused(text) and len(refused(text)) < 400


def test_a_mark_that_is_typed_twice_is_refused():
    text, line = edited("replicated", "b0.w0! ->", "b0.w0!! ->")
    assert refused(text).startswith(f"line {line}: not a value: 'b0.w0!'")


def test_line_ends_of_windows_are_refused():
    assert "CR LF" in refused(write_program(program()).replace("\n", "\r\n"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (FIRST_LINE, "a program", "line 1: a program begins with the line"),
        ("workers = 2", "worker = 2", "line 3: the header has no 'worker'"),
        ("workers = 2", "workers = two", "line 3: 'two' is no JSON value"),
        ("workers = 2", "workers = 2.0", "line 3: 2.0 is no value of workers: it is of the type int, in JSON"),
        ("workers = 2", "workers = null", "line 3: null is no value of workers"),
        ("workers = 2", "workers = true", "line 3: true is no value of workers"),
        ("workers = 2", f"workers = {'[' * 100_000}", f"line 3: '{'[' * 60}' is no JSON value of workers"),
        ('mode = "cdp_v2"', "mode = 5", "line 2: 5 is no value of mode"),
        ("ranks = null", 'ranks = "1"', 'line 9: "1" is no value of ranks'),
        ("gradient_bytes = []", 'gradient_bytes = ["a"]', "is no value of gradient_bytes"),
        ("workers = 2\n", "", "the header lacks workers"),
        ("gradient_bytes = []", "gradient_bytes = [4,-1]", "gradient_bytes=[4, -1]: give 0 or more"),
        ("workers = 2", "workers = 3", "the header does not describe a schedule: stages=2 is not a multiple"),
        ("fill 0", "fill 7", "has the pieces fill 7, fill 1, period 2, drain after 1, "),
        (
            "period 2",
            "period 3",
            "it needs fill 0, fill 1, period 2, drain after 1, drain after 2, drain after 3",
        ),
        ("drain after 1", "drain after 9", "period 2, drain after 9, drain after 2, drain after 3: it needs fill 0"),
        ("workers = 2", "workers = 3\nworkers = 2", "line 4: the header has workers twice"),
        ("\nrank 0\n", "\nrank \N{SUPERSCRIPT TWO}\n", "belongs to no rank of a piece"),
        ("\nrank 0\n", "\n", "belongs to no rank of a piece"),
        ("  0  F0.m0@v0", "  F0.m0@v0", "has no slot in front of its action"),
        ("  0  F0.m0@v0", "  40  F0.m0@v0", "fill 0 has the slots 0 to 2"),
        ("  0  F0.m0@v0", f"  {NINES}  F0.m0@v0", "has no slot in front of its action"),
        ("F0.m0@v0", f"F0.m{NINES}@v0", "not an action"),
        ("p0@v0", f"p0@v{NINES}", "not a value"),
        ("fill 0", f"fill {NINES}", "belongs to no rank of a piece"),
        ("rank 0", f"rank {NINES}", "belongs to no rank of a piece"),
        ("workers = 2", f"workers = {NINES}", "is no JSON value of workers"),
        ("workers = 2", "workers = 3", "stages=2 is not a multiple"),
        ("workers = 2", f"workers = {'9' * 30}", "forwards and backwards, the file"),
        ("stages = 2", "stages = 999999999", "has at least 1,999,999,998 forwards and backwards, the file"),
        ("fill 1", "fill 0", "'fill 0' stands twice in the run from step 0"),
        ("  2  S g1[0:1]>1: ", "  3  S g1[0:1]>1: ", "fill 0 has the slots 0 to 2"),  # the first slot after it
        ("  0  F0.m0@v0", "  2  F0.m0@v0", "slot 1 stands after slot 2: a rank runs slot after slot"),
        ("accumulate = 1", "accumulate = 0", "accumulate=0: at least 1 is needed"),
    ],
)
def test_a_broken_file_names_the_line_and_the_reason(old, new, said):
    text = write_program(program(placement="replicated"))
    assert old in text
    assert said in refused(text.replace(old, new, 1))


def test_a_file_that_lacks_runs_is_refused():
    parts = write_program(program(placement="replicated")).split("run from step ")
    assert len(parts) == 3
    said = refused("run from step ".join(parts[:2]))
    assert "the file has runs from the steps [0]" in said and "needs one from each of 0 to 1" in said
    assert "has at least 4 forwards and backwards, the file 0 actions" in refused(parts[0])


def test_a_header_of_more_than_the_file_can_hold_is_refused_at_once():
    """To write down the rule of so many micro-batches would take all memory."""
    text, _ = edited("single_device", "accumulate = 1", "accumulate = 50000000")
    assert "has at least 400,000,000 forwards and backwards, the file " in refused(text)


def test_a_period_that_cannot_be_repeated_is_refused():
    """It keeps a value at its end that it does not find at its begin."""
    text = write_program(program(placement="single_device"))
    begin = text.index("\nperiod ")
    at = text.index("p0@v1! ", begin)
    assert "line" in refused(text[:at] + "p0@v1 " + text[at + len("p0@v1! ") :])


def test_an_update_may_name_its_reads_in_any_order():
    text = write_program(program(stages=1, workers=1))
    turned = text.replace(" p0@v0! g0[0:1]!", " g0[0:1]! p0@v0!")
    assert turned != text and read_program(turned).runs.keys() == program(stages=1, workers=1).runs.keys()


@pytest.mark.parametrize("value", ["p0@v0", "s0.m0", "w0.m0"])
def test_what_cannot_be_sent_is_refused(value):
    text, _ = edited("replicated", "S g1[0:1]>1: g1[0:1] ->", f"S {value}>1: {value} ->")
    assert f"{value} cannot be sent" in refused(text)


def test_a_message_that_is_sent_twice_is_refused_with_the_slot_of_the_first():
    text, _ = edited("replicated", "  2  S g1[0:1]>1: g1[0:1] ->\n", "  2  S g1[0:1]>1: g1[0:1] ->\n" * 2)
    assert "its other end must come after that of S g1[0:1]>1 (rank 0, slot 2)" in refused(text)


def test_of_two_faults_the_choice_that_cannot_be_is_told_before_the_size_of_the_file():
    text, _ = edited("single_device", 'slot_order = "paper"', 'slot_order = "odd"')
    assert "slot_order" in refused(text.replace("accumulate = 1", "accumulate = 50000000"))


def test_only_a_read_of_parameters_that_is_too_early_is_told_when_its_version_exists():
    """With F0.m2 and F1.m2 in each other's slots, both the input and the version of F1.m2 are missing: it is the input
    that is told."""
    text = write_program(program())
    lines = text.split("\n")
    k, k2 = (
        next(k for k, line in enumerate(lines) if line.startswith(start)) for start in ("  4  F0.m2", "  5  F1.m2")
    )
    lines[k], lines[k2] = lines[k2].replace("  5  ", "  4  "), lines[k].replace("  4  ", "  5  ")
    swapped = "\n".join(lines)
    said = refused(swapped)
    assert "x1.m2 is not on rank 0" in said and "Staleness" not in said
