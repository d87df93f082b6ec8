//! Who has fallen silent, and what to do about it.
//!
//! A worker that vanished without a word goes on being offered to routers, with
//! placements that are gone. Only silence tells: bridges report now and then even
//! when there is nothing to report. So, with a time to live `ttl`:
//!
//! ```text
//!           nothing for ttl              nothing for another ttl
//!   heard ──────────────────> left out ──────────────────────────> removed
//!     ^                          │
//!     └──────── any batch ───────┘   at once, by the index itself
//! ```
//!
//! If more than half of the workers, and at least [`SUSPECT_MIN`], are silent at the same time,
//! then rather the network is: nobody is left out or removed, and those left out are
//! taken in again, until at least half of the workers have been heard since. Those that are
//! silent then get a whole `ttl` anew. As one that is left out is removed after `ttl`, all
//! that are silent at the same time have fallen so within one `ttl`.
//!
//! [`Liveness`] decides this from nothing but the time that passed and the numbers of
//! the workers' last batches, which the index keeps anyway; so an apply pays
//! nothing for it, and every order of events can be tried without a clock. Silence is thus
//! measured between two looks, [`period`] apart. A look that comes late counts as
//! [`PERIODS_MAX`]: where this process stood still, nobody could be heard.
//!
//! [`Watch`] is the thread that looks. It takes the index's lock for [`SLOTS_AT_ONCE`] workers
//! or one decision at a time. Each decision names the batch that it was made on,
//! so one that a further batch has overtaken does nothing.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use super::observe::Recorder;
use crate::arena::{Index, Label, Labels, WorkerId};

/// Fewer silent workers than these do not make the network a suspect.
const SUSPECT_MIN: usize = 3;

/// Looks at the workers in one time to live: silence is noticed an eighth too late at most.
const LOOKS_PER_TTL: u32 = 8;

/// Bounds of the pause between two looks: a look costs a few nanoseconds per worker.
const PERIOD_MIN: Duration = Duration::from_millis(10);
const PERIOD_MAX: Duration = Duration::from_secs(5);

/// Periods that a late look counts for at most.
const PERIODS_MAX: u32 = 2;

/// Workers that are looked at while the lock is held.
const SLOTS_AT_ONCE: usize = 4_096;

/// Workers of one look whose change is logged by name; further ones are counted.
const NAMED_MAX: usize = 16;

/// Pause between two looks.
fn period(ttl: Duration) -> Duration {
    (ttl / LOOKS_PER_TTL).clamp(PERIOD_MIN, PERIOD_MAX)
}

/// What is to be done about a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// Leave it out of answers.
    LeaveOut,
    /// Take it in again although nothing was heard: the network is the suspect.
    TakeIn,
    /// Nothing: a batch has taken it in again already.
    Back,
    /// Remove it and its placements.
    Remove,
}

/// A decision about a worker, made when its last batch had this number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Step {
    act: Act,
    worker: WorkerId,
    heard: u64,
}

/// What a look found.
#[derive(Debug, Default, PartialEq, Eq)]
struct Look {
    steps: Vec<Step>,
    /// Workers there are, and those of them that are silent.
    workers: usize,
    silent: usize,
}

/// A worker as it was at the last look.
#[derive(Debug, Clone, Copy)]
struct Record {
    worker: WorkerId,
    /// Number of its last batch.
    heard: u64,
    /// When that was new.
    since: Duration,
    /// Since when it is left out.
    left_out: Option<Duration>,
}

/// The state of all workers.
#[derive(Debug)]
struct Liveness {
    ttl: Duration,
    /// Time that has been watched.
    now: Duration,
    /// By the worker's number.
    records: Vec<Option<Record>>,
    /// Since when the network is the suspect.
    suspected: Option<Duration>,
}

impl Liveness {
    fn new(ttl: Duration) -> Self {
        Liveness { ttl, now: Duration::ZERO, records: Vec::new(), suspected: None }
    }

    /// Looks at all workers, each with the number of its last batch, `elapsed` after the last look.
    ///
    /// What is to be left out or removed is so only once [`Liveness::done`] says it.
    fn look(&mut self, elapsed: Duration, workers: &[(WorkerId, u64)]) -> Look {
        self.now += elapsed.min(period(self.ttl) * PERIODS_MAX);
        let mut found = Look { workers: workers.len(), ..Look::default() };
        self.listen(workers, &mut found);
        let overdue = |record: &Record| self.now.saturating_sub(record.since) >= self.ttl;
        found.silent = self.records.iter().flatten().filter(|record| overdue(record)).count();
        match self.suspected {
            None if found.silent >= SUSPECT_MIN && found.silent > found.workers / 2 => {
                self.suspect(&mut found)
            }
            None => self.judge(&mut found),
            Some(since) => {
                let heard = self.records.iter().flatten().filter(|record| record.since > since).count();
                if heard * 2 >= found.workers {
                    self.trust(since);
                }
            }
        }
        found
    }

    /// Notes who was heard, who is new and who is there no longer.
    fn listen(&mut self, workers: &[(WorkerId, u64)], found: &mut Look) {
        let slots = workers.iter().map(|(worker, _)| worker.index() + 1).max().unwrap_or(0);
        let mut before = std::mem::replace(&mut self.records, vec![None; slots]);
        for &(worker, heard) in workers {
            let known = before.get_mut(worker.index()).and_then(Option::take);
            let same = known.filter(|record| record.heard == heard);
            if same.is_none() && known.is_some_and(|record| record.left_out.is_some()) {
                found.steps.push(Step { act: Act::Back, worker, heard });
            }
            let new = Record { worker, heard, since: self.now, left_out: None };
            self.records[worker.index()] = Some(same.unwrap_or(new));
        }
    }

    /// Leaves out and removes whose time is over.
    fn judge(&self, found: &mut Look) {
        for record in self.records.iter().flatten() {
            let (since, act) = match record.left_out {
                None => (record.since, Act::LeaveOut),
                Some(since) => (since, Act::Remove),
            };
            if self.now.saturating_sub(since) >= self.ttl {
                found.steps.push(Step { act, worker: record.worker, heard: record.heard });
            }
        }
    }

    /// The network is the suspect from now on: takes in again who was left out.
    fn suspect(&mut self, found: &mut Look) {
        self.suspected = Some(self.now);
        for record in self.records.iter_mut().flatten().filter(|record| record.left_out.is_some()) {
            record.left_out = None;
            found.steps.push(Step { act: Act::TakeIn, worker: record.worker, heard: record.heard });
        }
    }

    /// The network is well again: who was not heard since `suspected` has a whole time to live anew.
    fn trust(&mut self, suspected: Duration) {
        self.suspected = None;
        for record in self.records.iter_mut().flatten().filter(|record| record.since <= suspected) {
            record.since = self.now;
        }
    }

    /// A step was taken.
    fn done(&mut self, step: Step) {
        let now = self.now;
        let Some(record) = self.records.get_mut(step.worker.index()) else { return };
        match step.act {
            Act::LeaveOut => record.iter_mut().for_each(|record| record.left_out = Some(now)),
            Act::Remove => *record = None,
            Act::TakeIn | Act::Back => {}
        }
    }
}

/// The thread that looks; it ends once this is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    _watched: mpsc::Sender<()>,
}

impl Watch {
    /// Watches the workers of `index`.
    pub(super) fn start(index: Arc<Index>, recorder: Arc<Recorder>, ttl: Duration) -> io::Result<Self> {
        let (watched, ended) = mpsc::channel::<()>();
        thread::Builder::new().name("liveness".to_owned()).spawn(move || {
            let mut liveness = Liveness::new(ttl);
            let mut last = Instant::now();
            while ended.recv_timeout(period(ttl)) == Err(RecvTimeoutError::Timeout) {
                let now = Instant::now();
                look(&index, &recorder, &mut liveness, now - last);
                last = now;
            }
        })?;
        Ok(Watch { _watched: watched })
    }
}

/// One look, and what follows from it.
fn look(index: &Index, recorder: &Recorder, liveness: &mut Liveness, elapsed: Duration) {
    let was_suspected = liveness.suspected.is_some();
    let found = liveness.look(elapsed, &workers(index));
    match (was_suspected, liveness.suspected.is_some()) {
        (false, true) => {
            recorder.suspect_network(true);
            tracing::warn!(
                silent = found.silent,
                workers = found.workers,
                "most workers fell silent together: the network is the suspect, nobody is left out or removed"
            );
        }
        (true, false) => {
            recorder.suspect_network(false);
            tracing::info!(workers = found.workers, "at least half of the workers are heard again");
        }
        _ => {}
    }
    if found.steps.is_empty() {
        return;
    }
    // Let go before anything changes: labels that are kept are copied with the first change.
    let named = names(&index.read().labels(), &found.steps);
    let mut told = Told::default();
    for (step, name) in found.steps.into_iter().zip(named) {
        let Step { act, worker, heard } = step;
        let done = match act {
            Act::LeaveOut => index.put_silent(worker, heard, true),
            Act::TakeIn => index.put_silent(worker, heard, false),
            Act::Remove => index.remove_if_unheard(worker, heard),
            Act::Back => true,
        };
        if !done {
            continue;
        }
        liveness.done(step);
        if act == Act::Remove {
            recorder.removed_for_silence(name.as_deref().unwrap_or_default());
        }
        told.step(act, name.as_deref().unwrap_or_default(), liveness.ttl);
    }
    told.rest();
}

/// All workers with the number of their last batch, read a stretch at a time.
fn workers(index: &Index) -> Vec<(WorkerId, u64)> {
    let mut found = Vec::new();
    let mut next = 0;
    loop {
        let view = index.read();
        if next >= view.worker_slots() {
            return found;
        }
        found.extend(view.heard_of(next..next + SLOTS_AT_ONCE));
        next += SLOTS_AT_ONCE;
    }
}

/// The names of the steps' workers; of one that is gone, none.
fn names(labels: &Labels, steps: &[Step]) -> Vec<Option<Box<str>>> {
    steps.iter().map(|step| labels.get(step.worker).map(|label: &Label| label.id().into())).collect()
}

/// How many lines each kind of change has had in one look.
#[derive(Debug, Default)]
struct Told([usize; 4]);

impl Told {
    /// Logs a change, unless there were many of its kind already.
    fn step(&mut self, act: Act, worker: &str, ttl: Duration) {
        let count = &mut self.0[act as usize];
        *count += 1;
        if *count > NAMED_MAX {
            return;
        }
        let ttl_ms = ttl.as_millis() as u64;
        match act {
            Act::LeaveOut => tracing::warn!(worker, ttl_ms, "worker is silent: left out of answers"),
            Act::TakeIn => tracing::info!(worker, "worker is in answers again, though not heard"),
            Act::Back => tracing::info!(worker, "worker is heard again: back in answers"),
            Act::Remove => tracing::warn!(worker, ttl_ms, "worker stayed silent: removed"),
        }
    }

    /// Counts in one line each what was not named.
    fn rest(self) {
        let more = |act: Act| self.0[act as usize].saturating_sub(NAMED_MAX);
        for (act, what) in [
            (Act::LeaveOut, "further workers are silent: left out of answers"),
            (Act::TakeIn, "further workers are in answers again, though not heard"),
            (Act::Back, "further workers are heard again: back in answers"),
            (Act::Remove, "further workers stayed silent: removed"),
        ] {
            if more(act) > 0 {
                tracing::warn!(workers = more(act), "{what}");
            }
        }
    }
}

#[cfg(test)]
mod tests;
