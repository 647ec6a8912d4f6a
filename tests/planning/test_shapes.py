"""Break-evens and the recommendation, on numbers that can be checked by hand."""

import numpy as np

from jaxtrl.planning.costs import Rates
from jaxtrl.planning.shapes import ShapeCost, ahead_from, at_share, effort, recommend

RATES = Rates(10.0, 30.0, "", 1.0, "")


def cost(programs, seconds):
    return ShapeCost(None, np.array(programs), np.array(seconds, float), {}, 0.0, 1.0)


def test_ahead_from_is_the_step_after_the_last_one_behind():
    theirs = np.array([1.0, 2, 3, 4])
    assert ahead_from(np.array([0.0, 1, 2, 3]), theirs) == 1
    assert ahead_from(np.array([9.0, 2, 9, 4]), theirs) == 4
    assert ahead_from(np.array([0.0, 0, 0, 5]), theirs) is None
    assert ahead_from(theirs, theirs) == 1


def test_time_counts_each_program_once_and_every_step():
    found = cost([1, 1, 2], [1, 2, 3])
    assert found.seconds(RATES).tolist() == [11, 13, 26]
    assert at_share(found, RATES, 6).tolist() == [11, 11, 13, 13, 26, 26]
    assert at_share(cost([1] * 4, [1] * 4), RATES, 2).tolist() == [12, 14]


def test_high_effort_pays_once_its_faster_steps_have_made_up_for_compiling():
    own = cost([1] * 100, [1] * 100)
    found = effort(RATES._replace(step_share=0.5), own, "low")
    assert found["extra_compile_minutes"] == 20 / 60
    assert found["break_even_step"] == 40
    assert found["step_share_to_pay"] == 0.8
    assert effort(RATES._replace(step_share=0.9), own, "low")["break_even_step"] is None
    assert effort(RATES, own, "low")["break_even_step"] is None
    assert effort(RATES._replace(compile_high=None), own, "low")["extra_compile_minutes"] is None


def test_what_does_not_fit_is_not_recommended():
    def setting(name, minutes):
        return {
            "name": name,
            "options": {"max_length": 1},
            "minutes": {"all": minutes},
            "compile_minutes": {"all": 1.0},
            "programs": {"all": 3},
            "padding_share": 0.1,
        }

    settings = [setting("slow", 5.0), setting("fast", 2.0), setting("middle", 3.0)]
    assert recommend(settings, [True] * 3)["name"] == "fast"
    found = recommend(settings, [True, False, True])
    assert found["name"] == "middle"
    assert "next slow with 5.0 minutes" in found["reason"]
    assert recommend(settings, [False] * 3)["name"] is None
