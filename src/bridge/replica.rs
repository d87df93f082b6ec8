//! What one server is to be told next: pure, with no connection and no clock.
//!
//! A server is *live* when it has been told everything but what still waits, and
//! then gets each change as it comes. Otherwise it is *behind*: it is new to the
//! bridge, it lost its memory, or more changes waited for it than may. One that is
//! behind is brought up to date from the mirror:
//!
//! 1. a clear of all tiers together with the first page of what the worker holds, then
//!    page after page;
//! 2. what changed meanwhile, again and again until nothing has. Of a block that
//!    changed only that is noted, and what is told is what is true when it is told. So
//!    queries meet true but shorter prefixes, whatever the order in which things happened;
//! 3. then it is live.
//!
//! A clear in the stream, or more changes than may be noted, begins this anew. No memory
//! grows with how long a server is away: at most [`PENDING_BYTES_MAX`] of changes wait for
//! it, or [`CHANGED_MAX`] blocks are noted.

use std::collections::{HashSet, VecDeque};

use super::PENDING_BYTES_MAX;
use super::chunker::Chunker;
use super::mirror::{Cursor, Mirror, tier_of};
use crate::arena::Tier;
use crate::pb::{ExternalKvAction, ExternalKvActionType as Type};

/// Most blocks that are noted as changed while a server is brought up to date, about 50 bytes each.
const CHANGED_MAX: usize = 1 << 20;

/// What a server is told in one RPC.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Told {
    /// At most what the contract allows; empty where only a sign of life is due.
    pub(super) actions: Vec<ExternalKvAction>,
    /// Whether the server knows everything that is true now once it has taken this.
    pub(super) synchronised: bool,
}

impl Told {
    /// A sign of life to a server that knows everything.
    pub(super) fn nothing() -> Told {
        Told { actions: Vec::new(), synchronised: true }
    }
}

/// One server's queue.
#[derive(Debug)]
pub(super) struct Replica {
    phase: Phase,
    /// Changes that wait for a live server.
    changes: Chunker,
    /// Times that the server was brought up to date.
    synchronisations: u64,
    changed_max: usize,
}

#[derive(Debug)]
enum Phase {
    Behind {
        /// Up to where pages have been given; `None` once all have.
        cursor: Option<Cursor>,
        changed: Changed,
    },
    Live,
}

/// Blocks that changed while a server is brought up to date, each once, in order of their first change.
#[derive(Debug, Default)]
struct Changed {
    order: VecDeque<(Tier, i64)>,
    noted: HashSet<(Tier, i64)>,
}

impl Changed {
    fn note(&mut self, tier: Tier, hashes: &[i64]) {
        for hash in hashes {
            if self.noted.insert((tier, *hash)) {
                self.order.push_back((tier, *hash));
            }
        }
    }

    fn take(&mut self) -> Option<(Tier, i64)> {
        let block = self.order.pop_front()?;
        self.noted.remove(&block);
        Some(block)
    }
}

impl Replica {
    /// A server that has been told nothing.
    pub(super) fn new() -> Self {
        Replica::with_changed_max(CHANGED_MAX)
    }

    fn with_changed_max(changed_max: usize) -> Self {
        Replica { phase: behind(), changes: Chunker::default(), synchronisations: 0, changed_max }
    }

    /// The server knows nothing, or something else than is thought.
    pub(super) fn fall_behind(&mut self) {
        self.phase = behind();
        self.changes.forget();
    }

    /// Takes changes that the mirror has taken.
    pub(super) fn push(&mut self, actions: &[ExternalKvAction]) {
        match &mut self.phase {
            Phase::Live => {
                self.changes.extend(actions);
                if self.changes.bytes() > PENDING_BYTES_MAX {
                    self.fall_behind();
                }
            }
            Phase::Behind { cursor, changed } => {
                for action in actions {
                    if action.r#type() == Type::ActionClearAllAtTier {
                        (*cursor, *changed) = (Some(Cursor::START), Changed::default());
                    } else if *cursor != Some(Cursor::START)
                        && let Some(tier) = tier_of(action.tier())
                    {
                        changed.note(tier, &action.hashes);
                    }
                }
                if changed.order.len() > self.changed_max {
                    self.fall_behind();
                }
            }
        }
    }

    /// What the server is to be told next, nothing only if it knows everything; it must be told before the next call.
    pub(super) fn next(&mut self, mirror: &Mirror) -> Option<Told> {
        let Phase::Behind { cursor, changed } = &mut self.phase else {
            let actions = self.changes.pop()?;
            return Some(Told { actions, synchronised: true });
        };
        let actions = match *cursor {
            Some(from) => {
                let (page, next) = mirror.page(from);
                *cursor = next;
                let mut actions = if from == Cursor::START { clears() } else { Vec::new() };
                actions.extend(page);
                actions
            }
            None => mirror.truth(|| changed.take()),
        };
        let synchronised = cursor.is_none() && changed.order.is_empty();
        if synchronised {
            self.phase = Phase::Live;
            self.synchronisations += 1;
        }
        Some(Told { actions, synchronised })
    }

    /// Whether the server is told each change as it comes.
    pub(super) fn is_live(&self) -> bool {
        matches!(self.phase, Phase::Live)
    }

    /// Whether nothing waits.
    pub(super) fn is_idle(&self) -> bool {
        self.is_live() && self.changes.is_empty()
    }

    /// Most bytes of what waits.
    pub(super) fn pending_bytes(&self) -> usize {
        self.changes.bytes()
    }

    /// Times that the server was brought up to date, the first one included.
    pub(super) fn synchronisations(&self) -> u64 {
        self.synchronisations
    }
}

fn behind() -> Phase {
    Phase::Behind { cursor: Some(Cursor::START), changed: Changed::default() }
}

/// A clear of every tier, also of those that the stream never fills: what was there is another's.
pub(super) fn clears() -> Vec<ExternalKvAction> {
    let clear = |tier: &Tier| ExternalKvAction {
        r#type: Type::ActionClearAllAtTier.into(),
        tier: tier.wire(),
        ..ExternalKvAction::default()
    };
    Tier::ALL.iter().map(clear).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::arena::{Index, Keys, Tuning};
    use crate::pb::TierType;

    /// Mask and tokens of each placement.
    type Held = BTreeMap<(i32, i64), (u32, u32)>;

    fn apply(held: &mut Held, action: &ExternalKvAction) {
        let at = |column: &[u32], place: usize| column.get(place).copied().unwrap_or(0);
        match action.r#type() {
            Type::ActionReport => {
                for (place, hash) in action.hashes.iter().enumerate() {
                    let (mask, tokens) = (at(&action.component_masks, place), at(&action.block_sizes, place));
                    held.insert((action.tier, *hash), (mask, tokens));
                }
            }
            Type::ActionRevoke => {
                held.retain(|(tier, hash), _| *tier != action.tier || !action.hashes.contains(hash))
            }
            _ => held.retain(|(tier, _), _| *tier != action.tier),
        }
    }

    #[derive(Debug, Clone)]
    enum Event {
        Report {
            tier: TierType,
            mask: u32,
            hashes: Vec<i64>,
        },
        Revoke {
            tier: TierType,
            hashes: Vec<i64>,
        },
        Clear,
        /// The server takes so many RPCs.
        Take(usize),
        /// The server loses its memory, with the next RPC or before it.
        Forget,
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let tier = prop::sample::select(vec![TierType::TierHbm, TierType::TierDram]);
        let hashes = || prop::collection::vec(0_i64..40, 1..20);
        let report = (tier.clone(), 0_u32..3, hashes()).prop_map(|(tier, mask, hashes)| Event::Report {
            tier,
            mask,
            hashes,
        });
        let revoke = (tier, hashes()).prop_map(|(tier, hashes)| Event::Revoke { tier, hashes });
        let event = prop_oneof![
            6 => report,
            4 => revoke,
            1 => Just(Event::Clear),
            8 => (1_usize..4).prop_map(Event::Take),
            2 => Just(Event::Forget),
        ];
        prop::collection::vec(event, 0..60)
    }

    /// A server as a plain map, beside the mirror that it is told from.
    struct Pair {
        mirror: Mirror,
        replica: Replica,
        truth: Held,
        server: Held,
        /// The server lost its memory and the bridge has not learned of it.
        forgot: bool,
    }

    impl Pair {
        fn push(&mut self, changes: impl FnOnce(&mut Chunker)) {
            let mut chunker = Chunker::default();
            changes(&mut chunker);
            while let Some(mut actions) = chunker.pop() {
                actions.iter().for_each(|action| apply(&mut self.truth, action));
                assert_eq!(self.mirror.apply(&mut actions), 0);
                self.replica.push(&actions);
            }
        }

        /// Takes one RPC; whether there was any.
        fn take(&mut self) -> bool {
            let was_live = self.replica.is_live();
            let Some(told) = self.replica.next(&self.mirror) else { return false };
            assert!(told.actions.len() <= 256, "{told:?}");
            for action in &told.actions {
                if !was_live && action.r#type() == Type::ActionReport {
                    let mut reported = Held::new();
                    apply(&mut reported, action);
                    for (block, said) in reported {
                        assert_eq!(self.truth.get(&block), Some(&said), "{block:?} is told as it is");
                    }
                }
                apply(&mut self.server, action);
            }
            if !was_live && told.synchronised && !self.forgot {
                assert_eq!(self.server, self.truth, "said to know everything");
            }
            true
        }
    }

    proptest! {
        #[test]
        fn a_server_comes_to_hold_what_the_worker_holds(
            events in events(),
            changed_max in prop_oneof![Just(CHANGED_MAX), 1_usize..30],
        ) {
            let index = Index::with_tuning(Tuning { keys: Keys::Fixed, ..Tuning::default() });
            let mut pair = Pair {
                mirror: Mirror::new(Arc::new(index), "w0", 1_000_000).with_page(7),
                replica: Replica::with_changed_max(changed_max),
                truth: Held::new(),
                server: Held::from([((3, 77), (0, 0))]),
                forgot: false,
            };
            for event in events {
                match event {
                    Event::Report { tier, mask, hashes } => {
                        pair.push(|changes| changes.report(tier, mask, 16, hashes.into_iter()));
                    }
                    Event::Revoke { tier, hashes } => {
                        pair.push(|changes| changes.revoke(tier, hashes.into_iter()));
                    }
                    Event::Clear => pair.push(|changes| {
                        changes.clear(&[TierType::TierHbm, TierType::TierDram, TierType::TierSsd]);
                    }),
                    Event::Take(times) => {
                        let _ = (0..times).all(|_| pair.take());
                    }
                    Event::Forget => {
                        pair.server.clear();
                        pair.forgot = true;
                        // What was under way still arrives before the bridge learns of it.
                        pair.take();
                        pair.replica.fall_behind();
                        pair.forgot = false;
                    }
                }
            }
            while pair.take() {}
            prop_assert!(pair.replica.is_idle());
            prop_assert_eq!(pair.server, pair.truth);
        }
    }

    #[test]
    fn a_server_that_takes_nothing_costs_a_bounded_queue() {
        let mirror = Mirror::new(Arc::new(Index::new()), "w0", 10_000_000);
        let mut replica = Replica::new();
        while !replica.is_live() {
            replica.next(&mirror).expect("more to tell");
        }
        let mut highest = 0;
        for first in (0..3_000_000).step_by(10_000) {
            let mut chunker = Chunker::default();
            chunker.report(TierType::TierHbm, 0, 16, first..first + 10_000);
            while let Some(mut actions) = chunker.pop() {
                mirror.apply(&mut actions);
                replica.push(&actions);
                highest = highest.max(replica.pending_bytes());
            }
        }
        assert!(highest <= PENDING_BYTES_MAX, "{highest}");
        assert!(!replica.is_live(), "what waited was given up");
        let mut told = 0;
        while let Some(Told { actions, .. }) = replica.next(&mirror) {
            told += actions.iter().map(|action| action.hashes.len()).sum::<usize>();
        }
        assert_eq!(told, 3_000_000);
    }
}
