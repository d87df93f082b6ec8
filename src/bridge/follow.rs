//! Which batches of a stream count, in which order: pure, with no socket and no clock.
//!
//! A publisher numbers its batches from 0 at each of its starts, which makes its
//! *lives*; it names none. A slow or late subscriber silently loses batches; a replay
//! socket, where there is one, gives the last ones again. This decides from numbers,
//! times and lost connections what is applied: each batch of a life once and in
//! order, a clear before the first one of a new life, and when the replay is asked,
//! from which number.
//!
//! What shows a new life:
//!
//! - A number that is not past the last one, with a later time in its batch. One
//!   without a later time is a repeat and is left out; where times do not tell, as
//!   0 after more than 0, it is a new life.
//! - A lost connection. Numbers that go on do not prove that the same publisher is
//!   back, so what was held is cleared, unless the replay proves the life: it is
//!   asked from the last batch applied, and gives it again byte for byte.
//! - A start of the bridge, which is a lost connection too. One that kept what was
//!   held resumes from the stored [`Mark`], in doubt: a replay proves the life as above.
//!   Without one a first live batch that has exactly the next number and a later time
//!   is believed, and nothing else; a lost connection before it ends that.
//!
//! A replay that starts later than asked, leaves a hole or ends early is asked again
//! from the first number missing, [`ATTEMPTS_MAX`] times without a batch gained; then
//! what is missing stays missing, and said. Live batches are held meanwhile, at most
//! [`HELD_BYTES_MAX`] of them; later ones are dropped and asked for like any gap.

use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hasher};

use bytes::Bytes;

/// Most bytes of live batches that are held during a repair.
pub const HELD_BYTES_MAX: usize = 64 * 1024 * 1024;

/// What a held batch takes beside its payload.
const HELD_BATCH_BYTES: usize = 2 * size_of::<Batch>();

/// Times in a row that a replay may give nothing before what is missing is given up.
pub const ATTEMPTS_MAX: u32 = 3;

/// Batches whose content is remembered, to tell a repeat from a new life where times do not.
const RECENT_MAX: usize = 4_096;

/// One batch as it arrived.
#[derive(Debug, Clone, PartialEq)]
pub struct Batch {
    /// Its number.
    pub sequence: u64,
    /// When it was made, as its publisher says.
    pub time: Option<f64>,
    /// MessagePack.
    pub payload: Bytes,
}

/// What is to be done, in this order.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// A life begins: what the worker held is void.
    Clear,
    /// The batch is next.
    Apply(Batch),
    /// What was kept from before a start is of the present life.
    Resumed,
    /// Batches are missing before the next one, for good.
    Missing {
        /// The first of them.
        from: u64,
        /// How many.
        count: u64,
        /// Whether they are the beginning of a life, missed by joining late.
        head: bool,
    },
    /// Numbers are missing; whether for good is yet to be seen.
    Gap {
        /// The first of them.
        from: u64,
        /// How many, as far as is known.
        count: u64,
    },
    /// A publisher began anew.
    Restart,
    /// A batch that was applied before came again.
    Repeat(u64),
    /// The batch was applied and came from the replay.
    Repaired,
    /// A live batch did not fit the held ones.
    Dropped(u64),
}

/// Follows one stream.
#[derive(Debug)]
pub struct Follower {
    replays: bool,
    held_max: usize,
    /// The last batch applied in this life.
    last: Option<Mark>,
    /// Whether the connection was lost since, and nothing has proved that the life goes on.
    doubt: bool,
    /// Whether the life is a stored one that nothing has proved or ended yet.
    resumes: bool,
    /// Numbers and digests of the last batches applied, in ascending order.
    recent: VecDeque<(u64, u64)>,
    repair: Option<Repair>,
    steps: VecDeque<Step>,
}

/// A batch that was applied, as far as it has to be told from others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mark {
    /// Its number.
    pub sequence: u64,
    /// When it was made, as its publisher says.
    pub time: Option<f64>,
    /// Digest of its payload. Another build may make another one of the same bytes,
    /// and then a stored mark proves nothing.
    pub digest: u64,
}

#[derive(Debug, Default)]
struct Repair {
    /// The replay has to give this number first, the last one applied.
    proof: Option<u64>,
    held: VecDeque<Batch>,
    held_bytes: usize,
    /// The last number dropped, that nothing after it is thought complete.
    dropped: Option<u64>,
    attempts: u32,
    /// Whether a question is to be asked.
    asks: bool,
    /// Whether the present question has gained a batch.
    gained: bool,
}

impl Follower {
    /// A follower that has seen nothing; `replays` when there is a replay socket.
    pub fn new(replays: bool) -> Self {
        Follower::with_held_max(replays, HELD_BYTES_MAX)
    }

    /// One with another bound: for tests.
    #[doc(hidden)]
    pub fn with_held_max(replays: bool, held_max: usize) -> Self {
        Follower {
            replays,
            held_max,
            last: None,
            doubt: false,
            resumes: false,
            recent: VecDeque::new(),
            repair: None,
            steps: VecDeque::new(),
        }
    }

    /// The next thing to do.
    pub fn step(&mut self) -> Option<Step> {
        self.steps.pop_front()
    }

    /// Goes on from a stored mark, in doubt; before anything else is told.
    pub fn resume(&mut self, mark: Mark) {
        (self.last, self.doubt, self.resumes) = (Some(mark), true, true);
    }

    /// The last batch applied in this life.
    pub fn mark(&self) -> Option<Mark> {
        self.last
    }

    /// Number of the last batch applied in this life.
    pub fn last(&self) -> Option<u64> {
        self.last.map(|mark| mark.sequence)
    }

    /// Whether a replay is being taken or asked for.
    pub fn repairing(&self) -> bool {
        self.repair.is_some()
    }

    /// The number from which the replay is to be asked now, told once per question.
    /// An answer under way is of no more use then.
    pub fn question(&mut self) -> Option<u64> {
        let repair = self.repair.as_mut()?;
        if !std::mem::take(&mut repair.asks) {
            return None;
        }
        Some(repair.proof.unwrap_or_else(|| next(self.last)))
    }

    /// A publisher is connected: history is asked for.
    pub fn connected(&mut self) {
        if self.replays && self.repair.is_none() {
            let proof = if self.doubt { self.last.map(|mark| mark.sequence) } else { None };
            self.begin(proof);
        }
    }

    /// The publisher's connection is gone.
    pub fn disconnected(&mut self) {
        // Held batches are of the connection that is gone; in order behind what the replay gives next.
        self.repair = None;
        self.doubt = self.last.is_some();
        // A replay can still prove a stored life. A number that happens to fit proves less with each publisher
        // that has come and gone.
        self.resumes &= self.replays;
    }

    /// What the worker held is withdrawn; its next batch begins anew.
    pub fn withdraw(&mut self) {
        self.repair = None;
        self.forget();
        self.steps.push_back(Step::Clear);
    }

    /// Takes a live batch.
    pub fn live(&mut self, batch: Batch) {
        if self.repair.is_none() {
            self.take(batch);
            return;
        }
        if self.repair.as_ref().is_some_and(|repair| repair.proof.is_none()) && self.is_new_life(&batch) {
            self.restart(batch);
            return;
        }
        let Some(repair) = &mut self.repair else { return };
        let known = repair.held.back();
        if let Some(known) = known.filter(|known| batch.sequence <= known.sequence) {
            if later(batch.time, known.time) {
                self.restart(batch);
            } else {
                self.steps.push_back(Step::Repeat(batch.sequence));
            }
            return;
        }
        let bytes = batch.payload.len() + HELD_BATCH_BYTES;
        if repair.held_bytes + bytes > self.held_max || repair.dropped.is_some() {
            repair.dropped = Some(batch.sequence);
            self.steps.push_back(Step::Dropped(batch.sequence));
            return;
        }
        repair.held_bytes += bytes;
        // A copy: the message shares its memory with its neighbours, which the count does not know.
        repair.held.push_back(Batch { payload: Bytes::copy_from_slice(&batch.payload), ..batch });
    }

    /// Takes a batch of a replay's answer.
    pub fn replayed(&mut self, batch: Batch) {
        let Some(repair) = &mut self.repair else { return };
        if let Some(proof) = repair.proof {
            if batch.sequence < proof {
                return;
            }
            repair.proof = None;
            self.doubt = false;
            let same = self
                .last
                .is_some_and(|last| last.sequence == batch.sequence && last.digest == digest(&batch.payload));
            if !same {
                self.begin_life();
                self.ask_anew();
                return;
            }
            repair.gained = true;
            self.proved();
            return;
        }
        let wanted = next(self.last);
        if batch.sequence < wanted {
            // What the live socket gave already, unless another life answers.
            if self.last.is_some_and(|last| later(batch.time, last.time)) {
                self.begin_life();
                self.ask_anew();
            }
            return;
        }
        if batch.sequence > wanted {
            if repair.attempts + 1 < ATTEMPTS_MAX {
                self.ask_again();
                return;
            }
            self.miss(batch.sequence);
        }
        if let Some(repair) = &mut self.repair {
            repair.gained = true;
            repair.attempts = 0;
        }
        self.apply(batch);
        self.steps.push_back(Step::Repaired);
    }

    /// The replay's answer has its end marker.
    pub fn replay_ended(&mut self) {
        let Some(repair) = &self.repair else { return };
        if repair.proof.is_some() {
            // The last batch applied is not among those the publisher has sent.
            self.begin_life();
            self.ask_anew();
            return;
        }
        self.drain(false);
    }

    /// The replay stopped answering, or could not be asked.
    pub fn replay_failed(&mut self) {
        let Some(repair) = &mut self.repair else { return };
        if !repair.gained && repair.attempts + 1 >= ATTEMPTS_MAX {
            self.drain(true);
        } else {
            self.ask_again();
        }
    }

    /// Takes a live batch outside of a repair.
    fn take(&mut self, batch: Batch) {
        if self.goes_on(&batch) {
            self.proved();
        }
        if self.doubt || self.is_new_life(&batch) {
            self.restart(batch);
            return;
        }
        let wanted = next(self.last);
        if batch.sequence < wanted {
            self.steps.push_back(Step::Repeat(batch.sequence));
            return;
        }
        if batch.sequence > wanted {
            if self.replays {
                self.gap(batch.sequence);
                self.begin(None);
                self.live(batch);
                return;
            }
            if self.last.is_some() {
                self.gap(batch.sequence);
            }
            self.miss(batch.sequence);
        }
        self.apply(batch);
    }

    /// Whether a batch that is not past the last one is of a new life.
    fn is_new_life(&self, batch: &Batch) -> bool {
        let Some(last) = self.last.filter(|last| batch.sequence <= last.sequence) else { return false };
        let known = self.recent.binary_search_by_key(&batch.sequence, |(sequence, _)| *sequence);
        if known
            .is_ok_and(|at| self.recent.get(at).is_some_and(|(_, known)| *known == digest(&batch.payload)))
        {
            return false;
        }
        let restarts = batch.sequence == 0 && last.sequence > 0;
        later(batch.time, last.time) || (restarts && !later(last.time, batch.time))
    }

    /// Whether a batch continues a stored life as far as can be told without a replay.
    fn goes_on(&self, batch: &Batch) -> bool {
        let follows =
            |last: Mark| batch.sequence == next(Some(last)) && later(batch.time, last.time) && !self.replays;
        self.resumes && self.last.is_some_and(follows)
    }

    /// The life goes on; told if it is a stored one.
    fn proved(&mut self) {
        self.doubt = false;
        if std::mem::take(&mut self.resumes) {
            self.steps.push_back(Step::Resumed);
        }
    }

    fn restart(&mut self, batch: Batch) {
        self.repair = None;
        self.begin_life();
        if self.replays && batch.sequence > 0 {
            self.begin(None);
            self.live(batch);
        } else {
            self.take(batch);
        }
    }

    fn begin_life(&mut self) {
        self.forget();
        self.steps.extend([Step::Restart, Step::Clear]);
    }

    /// Forgets a life whose placements are cleared.
    fn forget(&mut self) {
        (self.last, self.doubt, self.resumes) = (None, false, false);
        self.recent.clear();
    }

    fn begin(&mut self, proof: Option<u64>) {
        self.repair = Some(Repair { proof, asks: true, ..Repair::default() });
    }

    /// Asks from the beginning of a life just begun; what is held is that life's too.
    fn ask_anew(&mut self) {
        if let Some(repair) = &mut self.repair {
            (repair.proof, repair.attempts, repair.asks, repair.gained) = (None, 0, true, false);
        }
    }

    fn ask_again(&mut self) {
        if let Some(repair) = &mut self.repair {
            repair.attempts = if repair.gained { 0 } else { repair.attempts + 1 };
            (repair.asks, repair.gained) = (true, false);
        }
    }

    /// Applies what is held as far as it follows, and asks again or ends the repair.
    /// With `give_up`, the first hole is passed over.
    fn drain(&mut self, give_up: bool) {
        let Some(mut repair) = self.repair.take() else { return };
        if repair.proof.take().is_some() {
            // Nothing proved the life: a publisher that does not answer is taken for a new one.
            self.begin_life();
        }
        let mut give_up = give_up || (!repair.gained && repair.attempts + 1 >= ATTEMPTS_MAX);
        while let Some(batch) = repair.held.front() {
            let wanted = next(self.last);
            if batch.sequence > wanted {
                if !std::mem::take(&mut give_up) {
                    self.repair = Some(repair);
                    self.ask_again();
                    return;
                }
                self.miss(batch.sequence);
                repair.gained = true;
            }
            let Some(batch) = repair.held.pop_front() else { break };
            repair.held_bytes -= batch.payload.len() + HELD_BATCH_BYTES;
            if batch.sequence >= next(self.last) {
                self.apply(batch);
            }
        }
        match repair.dropped {
            Some(dropped) if dropped >= next(self.last) && !give_up => {
                self.gap(dropped + 1);
                repair.dropped = None;
                self.repair = Some(repair);
                self.ask_again();
            }
            _ => {}
        }
    }

    fn gap(&mut self, upto: u64) {
        let from = next(self.last);
        self.steps.push_back(Step::Gap { from, count: upto - from });
    }

    /// Gives up what is missing before `upto`.
    fn miss(&mut self, upto: u64) {
        let from = next(self.last);
        self.steps.push_back(Step::Missing { from, count: upto - from, head: self.last.is_none() });
    }

    fn apply(&mut self, batch: Batch) {
        let digest = digest(&batch.payload);
        self.last = Some(Mark { sequence: batch.sequence, time: batch.time, digest });
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back((batch.sequence, digest));
        self.steps.push_back(Step::Apply(batch));
    }
}

fn next(last: Option<Mark>) -> u64 {
    last.map_or(0, |last| last.sequence.saturating_add(1))
}

fn later(time: Option<f64>, than: Option<f64>) -> bool {
    time.zip(than).is_some_and(|(time, than)| time > than)
}

fn digest(payload: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(payload);
    hasher.finish()
}
