//! Every order of silence and noise, without a clock.

use super::*;

const TTL: Duration = Duration::from_millis(800);

/// A fleet whose workers report when they are told to.
struct Fleet {
    liveness: Liveness,
    /// Number of each worker's last batch; none once it is removed.
    heard: Vec<Option<u64>>,
    batches: u64,
    /// Whether the index does what it is told.
    obeys: bool,
}

impl Fleet {
    fn of(workers: usize) -> Self {
        let mut fleet = Fleet { liveness: Liveness::new(TTL), heard: Vec::new(), batches: 0, obeys: true };
        fleet.heard.resize(workers, None);
        (0..workers).for_each(|worker| fleet.report(worker));
        assert_eq!(fleet.pass(1, &[]), []);
        fleet
    }

    fn report(&mut self, worker: usize) {
        self.batches += 1;
        self.heard[worker] = Some(self.batches);
    }

    /// Looks once after `elapsed`; what was decided, and by the index done.
    fn look(&mut self, elapsed: Duration) -> Vec<(Act, usize)> {
        let heard = self.heard.iter().enumerate();
        let workers: Vec<_> =
            heard.filter_map(|(id, heard)| Some((WorkerId(id as u32), (*heard)?))).collect();
        let found = self.liveness.look(elapsed, &workers);
        for step in found.steps.iter().filter(|_| self.obeys) {
            self.liveness.done(*step);
            if step.act == Act::Remove {
                self.heard[step.worker.index()] = None;
            }
        }
        found.steps.into_iter().map(|step| (step.act, step.worker.index())).collect()
    }

    /// Looks so many times, a period apart, while `speakers` report before each.
    fn pass(&mut self, periods: u32, speakers: &[usize]) -> Vec<(Act, usize)> {
        let mut acts = Vec::new();
        for _ in 0..periods {
            speakers.iter().for_each(|worker| self.report(*worker));
            acts.extend(self.look(period(TTL)));
        }
        acts
    }

    fn is_suspicious(&self) -> bool {
        self.liveness.suspected.is_some()
    }
}

#[test]
fn who_reports_stays_and_who_does_not_is_left_out_then_removed() {
    let mut fleet = Fleet::of(4);
    let others = [0, 1, 2];
    assert_eq!(fleet.pass(7, &others), []);
    assert_eq!(fleet.pass(1, &others), [(Act::LeaveOut, 3)]);
    assert_eq!(fleet.pass(7, &others), []);
    assert_eq!(fleet.pass(1, &others), [(Act::Remove, 3)]);
    assert_eq!(fleet.pass(40, &others), []);
    // It comes back as any new worker does.
    assert_eq!(fleet.pass(20, &[0, 1, 2, 3]), []);
    assert_eq!(fleet.pass(8, &others), [(Act::LeaveOut, 3)]);
}

#[test]
fn one_batch_takes_a_silent_worker_back_with_its_whole_time() {
    let mut fleet = Fleet::of(4);
    assert_eq!(fleet.pass(15, &[0, 1, 2]), [(Act::LeaveOut, 3)]);
    fleet.report(3);
    assert_eq!(fleet.pass(1, &[0, 1, 2]), [(Act::Back, 3)]);
    assert_eq!(fleet.pass(7, &[0, 1, 2]), []);
    assert_eq!(fleet.pass(9, &[0, 1, 2]), [(Act::LeaveOut, 3), (Act::Remove, 3)]);
}

#[test]
fn small_fleets_suspect_nobody() {
    for workers in [1, 2] {
        let mut fleet = Fleet::of(workers);
        let out: Vec<_> = (0..workers).map(|worker| (Act::LeaveOut, worker)).collect();
        assert_eq!(fleet.pass(8, &[]), out, "{workers}");
        let gone: Vec<_> = (0..workers).map(|worker| (Act::Remove, worker)).collect();
        assert_eq!(fleet.pass(8, &[]), gone, "{workers}");
        assert!(!fleet.is_suspicious());
    }
}

#[test]
fn half_of_a_fleet_may_fall_silent_but_not_more() {
    let mut fleet = Fleet::of(6);
    let out = [3, 4, 5].map(|worker| (Act::LeaveOut, worker));
    assert_eq!(fleet.pass(8, &[0, 1, 2]), out);
    assert!(!fleet.is_suspicious());
    let mut fleet = Fleet::of(5);
    assert_eq!(fleet.pass(80, &[0, 1]), []);
    assert!(fleet.is_suspicious());
}

#[test]
fn those_just_left_out_are_taken_in_again_when_the_network_is_suspected() {
    let mut fleet = Fleet::of(5);
    assert_eq!(fleet.pass(4, &[0, 1, 2, 3]), []);
    assert_eq!(fleet.pass(4, &[0, 1]), [(Act::LeaveOut, 4)]);
    // The third and fourth follow while the fifth is still left out: three of five.
    assert_eq!(fleet.pass(4, &[0, 1]), [(Act::TakeIn, 4)]);
    assert!(fleet.is_suspicious());
    assert_eq!(fleet.pass(100, &[0, 1]), []);
}

#[test]
fn a_suspicion_ends_with_half_of_the_fleet_and_the_silent_get_a_fresh_window() {
    let mut fleet = Fleet::of(7);
    assert_eq!(fleet.pass(30, &[0]), []);
    assert!(fleet.is_suspicious());
    assert_eq!(fleet.pass(30, &[0, 1, 2]), []);
    assert!(fleet.is_suspicious(), "three of seven are less than half");
    assert_eq!(fleet.pass(1, &[0, 1, 2, 3]), []);
    assert!(!fleet.is_suspicious());
    let out = [4, 5, 6].map(|worker| (Act::LeaveOut, worker));
    assert_eq!(fleet.pass(7, &[0, 1, 2, 3]), []);
    assert_eq!(fleet.pass(1, &[0, 1, 2, 3]), out);
    assert_eq!(fleet.pass(8, &[0, 1, 2, 3]), [4, 5, 6].map(|worker| (Act::Remove, worker)));
}

#[test]
fn a_suspicion_ends_when_the_silent_are_dropped() {
    let mut fleet = Fleet::of(8);
    assert_eq!(fleet.pass(20, &[0, 1]), []);
    assert!(fleet.is_suspicious());
    fleet.heard.truncate(4);
    assert_eq!(fleet.pass(1, &[0, 1]), []);
    assert!(!fleet.is_suspicious());
}

#[test]
fn a_process_that_stood_still_accuses_nobody() {
    let mut fleet = Fleet::of(2);
    assert_eq!(fleet.pass(3, &[0, 1]), []);
    assert_eq!(fleet.look(Duration::from_secs(3_600)), []);
    assert_eq!(fleet.pass(30, &[0, 1]), []);
}

#[test]
fn a_batch_that_overtakes_a_decision_undoes_it() {
    let mut fleet = Fleet::of(4);
    fleet.obeys = false;
    assert_eq!(fleet.pass(8, &[0, 1, 2]), [(Act::LeaveOut, 3)]);
    // The index had heard of it and did nothing, so it is not back either.
    assert_eq!(fleet.pass(8, &[0, 1, 2, 3]), []);
}

#[test]
fn a_number_that_another_worker_takes_over_starts_anew() {
    let mut fleet = Fleet::of(4);
    assert_eq!(fleet.pass(7, &[0, 1, 2]), []);
    fleet.heard[3] = None;
    assert_eq!(fleet.pass(1, &[0, 1, 2]), []);
    fleet.report(3);
    assert_eq!(fleet.pass(8, &[0, 1, 2]), []);
    assert_eq!(fleet.pass(1, &[0, 1, 2]), [(Act::LeaveOut, 3)]);
}
