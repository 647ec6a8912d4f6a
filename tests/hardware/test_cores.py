"""Sets of NeuronCores: what is allowed passes, all else is refused in one sentence that names what is allowed."""

import pytest

from jaxtrl.hardware.cores import INSTANCES, check_cores, check_disjoint, format_cores, parse_cores, split_cores

ALLOWED = {
    ("trn1.2xlarge", "0"),
    ("trn1.2xlarge", "0-1"),
    ("trn1.32xlarge", "31"),
    ("trn1.32xlarge", "8-15"),
    ("trn1.32xlarge", "0-31"),
    ("trn2.3xlarge", "3"),
    ("trn2.3xlarge", "0-3"),
    ("trn2.3xlarge", "0,1,2,3"),
    ("trn2.48xlarge", "48-63"),
    ("trn2.48xlarge", "0-63"),
}


@pytest.mark.parametrize(("instance", "cores"), sorted(ALLOWED))
def test_allowed_sets(instance, cores):
    check_cores(instance, parse_cores(cores))


@pytest.mark.parametrize("instance", INSTANCES)
def test_exactly_the_documented_sets_are_allowed(instance):
    """Every contiguous set of every instance, against the rule written out."""
    kind = INSTANCES[instance]
    for first in range(kind.cores):
        for last in range(first, kind.cores + 2):
            cores, count = range(first, last + 1), last - first + 1
            if count in kind.counts and first % count == 0 and last < kind.cores:
                check_cores(instance, cores)
            else:
                with pytest.raises(ValueError, match="allowed are 0, 1"):
                    check_cores(instance, cores)


@pytest.mark.parametrize(
    ("cores", "sentence"),
    [
        ("0-1", "cores 0-1 are 2, which a job on trn2.3xlarge may not have: allowed are 0, 1, 2, 3; 0-3"),
        ("1-3", "cores 1-3 are 3, which a job on trn2.3xlarge may not have"),
        ("1-4", "cores 1-4 reach beyond the 4 of a trn2.3xlarge"),
        ("4", "cores 4 reach beyond the 4"),
    ],
)
def test_refused_sets_of_a_trn2(cores, sentence):
    with pytest.raises(ValueError, match=sentence):
        check_cores("trn2.3xlarge", parse_cores(cores))


def test_a_start_between_multiples():
    with pytest.raises(ValueError, match=r"cores 2-5 do not begin at a multiple of 4: .*0-3, 4-7, ..., 60-63"):
        check_cores("trn2.48xlarge", parse_cores("2-5"))


@pytest.mark.parametrize("text", ["3-0", "0,2", "1,0", "0-", "a", "", "-1", "0,1,1"])
def test_what_is_no_contiguous_increasing_set(text):
    with pytest.raises(ValueError, match="cores"):
        parse_cores(text)


def test_parse_and_format():
    assert [format_cores(parse_cores(text)) for text in ("3", 3, "4-7", "4,5,6,7", "2-2")] == [
        "3",
        "3",
        "4-7",
        "4-7",
        "2",
    ]


def test_unknown_instance():
    with pytest.raises(ValueError, match=r"unknown Neuron instance 'trn2.large': expected one of trn1.2xlarge"):
        check_cores("trn2.large", range(1))


def test_a_core_belongs_to_one_process():
    check_disjoint({"the trainer": range(1), "worker 0": range(1, 2), "worker 1": range(2, 3)})
    with pytest.raises(ValueError, match="the trainer and worker 1 both have cores 2-3"):
        check_disjoint({"the trainer": range(4), "worker 0": range(4, 8), "worker 1": range(2, 6)})


def test_split_among_workers():
    assert split_cores("trn2.3xlarge", range(1, 4), 3) == [range(1, 2), range(2, 3), range(3, 4)]
    assert split_cores("trn2.48xlarge", range(16, 64), 3) == [range(16, 32), range(32, 48), range(48, 64)]
    with pytest.raises(ValueError, match="cannot be shared equally by 2 processes"):
        split_cores("trn2.3xlarge", range(1, 4), 2)
    with pytest.raises(ValueError, match=r"are 2, which a job on trn2.3xlarge may not have"):
        split_cores("trn2.3xlarge", range(4), 2)
