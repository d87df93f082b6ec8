//! Changes in exact order, packed into actions and RPCs within the contract's bounds.
//!
//! Pure: it knows nothing of events, connections or time. What is pushed while an
//! RPC is under way joins the RPCs that wait: neighbouring stores at one tier
//! become one action, as do neighbouring removals, and a list of hashes that is
//! longer than an RPC may carry goes on in the next one. Order never changes.
//!
//! Cost: a push appends to columns; the waiting bytes are counted, so that the
//! caller can stop reading before they grow past a bound.

use std::collections::VecDeque;

use crate::limits;
use crate::pb::{ExternalKvAction, ExternalKvActionType as Type, TierType as Tier};

/// Bytes that a waiting hash takes at most: itself, its mask and its size, twice,
/// as a column that grew may have room for as much again.
pub(super) const HASH_BYTES: usize = 2 * 16;

/// Bytes that a waiting action takes beside its hashes, likewise; a column that
/// holds one entry has room for four.
pub(super) const ACTION_BYTES: usize = 2 * size_of::<ExternalKvAction>() + 4 * HASH_BYTES;

/// Packs changes into RPCs.
#[derive(Debug)]
pub struct Chunker {
    actions_max: usize,
    hashes_max: usize,
    /// Invariant: none is empty, none is over the bounds, and only the last one grows.
    rpcs: VecDeque<Rpc>,
    bytes: usize,
}

#[derive(Debug, Default)]
struct Rpc {
    actions: Vec<ExternalKvAction>,
    hashes: usize,
}

impl Rpc {
    fn bytes(&self) -> usize {
        self.actions.len() * ACTION_BYTES + self.hashes * HASH_BYTES
    }
}

impl Default for Chunker {
    fn default() -> Self {
        Chunker::with_bounds(limits::ACTIONS_PER_APPLY_MAX, limits::HASHES_PER_CALL_MAX)
    }
}

impl Chunker {
    /// A chunker with other bounds than the contract's, neither of them 0: for tests.
    #[doc(hidden)]
    pub fn with_bounds(actions_max: usize, hashes_max: usize) -> Self {
        Chunker { actions_max, hashes_max, rpcs: VecDeque::new(), bytes: 0 }
    }

    /// The blocks are held at `tier`, each with `mask` and of `block_tokens` tokens.
    pub fn report(&mut self, tier: Tier, mask: u32, block_tokens: u32, hashes: impl Iterator<Item = i64>) {
        self.append(Type::ActionReport, tier, hashes, |action, earlier| {
            extend_column(&mut action.component_masks, mask, earlier, action.hashes.len());
            extend_column(&mut action.block_sizes, block_tokens, earlier, action.hashes.len());
        });
    }

    /// The same changes as `actions`, which keep the contract.
    pub fn extend(&mut self, actions: &[ExternalKvAction]) {
        for action in actions {
            match action.r#type() {
                Type::ActionReport => self.extend_report(action),
                Type::ActionRevoke => self.revoke(action.tier(), action.hashes.iter().copied()),
                Type::ActionClearAllAtTier => self.clear(&[action.tier()]),
                Type::ActionUnknown => {}
            }
        }
    }

    /// A report's blocks in runs of one mask and size, mostly one.
    fn extend_report(&mut self, report: &ExternalKvAction) {
        let at = |column: &[u32], place: usize| column.get(place).copied().unwrap_or(0);
        let values = |place: usize| (at(&report.component_masks, place), at(&report.block_sizes, place));
        let mut from = 0;
        while from < report.hashes.len() {
            let (mask, block_tokens) = values(from);
            let alike =
                (from..report.hashes.len()).take_while(|place| values(*place) == (mask, block_tokens));
            let to = from + alike.count();
            self.report(report.tier(), mask, block_tokens, report.hashes[from..to].iter().copied());
            from = to;
        }
    }

    /// The blocks are no longer held at `tier`.
    pub fn revoke(&mut self, tier: Tier, hashes: impl Iterator<Item = i64>) {
        self.append(Type::ActionRevoke, tier, hashes, |_, _| {});
    }

    /// Nothing is held at any of `tiers`.
    pub fn clear(&mut self, tiers: &[Tier]) {
        for tier in tiers {
            self.open_action(Type::ActionClearAllAtTier, *tier);
        }
    }

    /// The next RPC's actions, at least one, or `None` when nothing waits.
    pub fn pop(&mut self) -> Option<Vec<ExternalKvAction>> {
        let rpc = self.rpcs.pop_front()?;
        self.bytes -= rpc.bytes();
        Some(rpc.actions)
    }

    /// Forgets all that waits.
    pub fn forget(&mut self) {
        self.rpcs.clear();
        self.bytes = 0;
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.rpcs.is_empty()
    }

    /// Most bytes that the waiting changes take.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Appends `hashes` to actions of this type and tier; `align` is told how many
    /// an action held before it got its share.
    fn append(
        &mut self,
        kind: Type,
        tier: Tier,
        hashes: impl Iterator<Item = i64>,
        align: impl Fn(&mut ExternalKvAction, usize),
    ) {
        let mut hashes = hashes.peekable();
        while hashes.peek().is_some() {
            let room = self.room(kind, tier);
            let Some(rpc) = self.rpcs.back_mut() else { return };
            let Some(action) = rpc.actions.last_mut() else { return };
            let earlier = action.hashes.len();
            action.hashes.extend(hashes.by_ref().take(room));
            let added = action.hashes.len() - earlier;
            align(action, earlier);
            rpc.hashes += added;
            self.bytes += added * HASH_BYTES;
        }
    }

    /// Makes the last action one of this type and tier; returns how many hashes
    /// it can take, at least one.
    fn room(&mut self, kind: Type, tier: Tier) -> usize {
        if let Some(rpc) = self.rpcs.back()
            && rpc.hashes < self.hashes_max
            && let Some(action) = rpc.actions.last()
            && action.r#type == i32::from(kind)
            && action.tier == i32::from(tier)
        {
            return self.hashes_max - rpc.hashes;
        }
        self.open_action(kind, tier)
    }

    /// Opens an action; returns how many hashes it can take, at least one.
    fn open_action(&mut self, kind: Type, tier: Tier) -> usize {
        let action =
            ExternalKvAction { r#type: kind.into(), tier: tier.into(), ..ExternalKvAction::default() };
        self.bytes += ACTION_BYTES;
        match self.rpcs.back_mut() {
            Some(rpc) if rpc.actions.len() < self.actions_max && rpc.hashes < self.hashes_max => {
                rpc.actions.push(action);
                self.hashes_max - rpc.hashes
            }
            _ => {
                self.rpcs.push_back(Rpc { actions: vec![action], hashes: 0 });
                self.hashes_max
            }
        }
    }
}

/// Gives the entries from `earlier` to `length` the value; a column of zeros
/// stays empty, as absent means zero.
fn extend_column(column: &mut Vec<u32>, value: u32, earlier: usize, length: usize) {
    if value != 0 && column.is_empty() {
        column.resize(earlier, 0);
    }
    if value != 0 || !column.is_empty() {
        column.resize(length, value);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const TIERS: [Tier; 3] = [Tier::TierHbm, Tier::TierDram, Tier::TierSsd];

    #[derive(Debug, Clone)]
    enum Push {
        Report { tier: Tier, mask: u32, block_tokens: u32, hashes: Vec<i64> },
        Revoke { tier: Tier, hashes: Vec<i64> },
        Clear,
    }

    fn push(chunker: &mut Chunker, push: &Push) {
        match push {
            Push::Report { tier, mask, block_tokens, hashes } => {
                chunker.report(*tier, *mask, *block_tokens, hashes.iter().copied());
            }
            Push::Revoke { tier, hashes } => chunker.revoke(*tier, hashes.iter().copied()),
            Push::Clear => chunker.clear(&TIERS),
        }
    }

    /// One change to one block, or a clear: what order is judged by.
    type Step = (Type, i32, Option<(i64, u32, u32)>);

    fn steps_of_push(push: &Push) -> Vec<Step> {
        match push {
            Push::Report { tier, mask, block_tokens, hashes } => hashes
                .iter()
                .map(|hash| (Type::ActionReport, i32::from(*tier), Some((*hash, *mask, *block_tokens))))
                .collect(),
            Push::Revoke { tier, hashes } => hashes
                .iter()
                .map(|hash| (Type::ActionRevoke, i32::from(*tier), Some((*hash, 0, 0))))
                .collect(),
            Push::Clear => {
                TIERS.iter().map(|tier| (Type::ActionClearAllAtTier, i32::from(*tier), None)).collect()
            }
        }
    }

    fn steps_of_action(action: &ExternalKvAction) -> Vec<Step> {
        let kind = action.r#type();
        if kind == Type::ActionClearAllAtTier {
            return vec![(kind, action.tier, None)];
        }
        let at = |column: &[u32], index: usize| if column.is_empty() { 0 } else { column[index] };
        let entries = action.hashes.iter().enumerate();
        entries
            .map(|(index, hash)| {
                let entry = (*hash, at(&action.component_masks, index), at(&action.block_sizes, index));
                (kind, action.tier, Some(entry))
            })
            .collect()
    }

    fn reduce(steps: &[Step]) -> BTreeMap<(i32, i64), (u32, u32)> {
        let mut held = BTreeMap::new();
        for (kind, tier, entry) in steps {
            match (kind, entry) {
                (Type::ActionReport, Some((hash, mask, tokens))) => {
                    held.insert((*tier, *hash), (*mask, *tokens));
                }
                (Type::ActionRevoke, Some((hash, ..))) => {
                    held.remove(&(*tier, *hash));
                }
                _ => held.retain(|(at, _), _| at != tier),
            }
        }
        held
    }

    fn pushes() -> impl Strategy<Value = Vec<Push>> {
        let tier = prop::sample::select(TIERS.to_vec());
        let hashes = prop::collection::vec(-4_i64..4, 0..9);
        let report = (tier.clone(), 0_u32..3, 0_u32..3, hashes.clone())
            .prop_map(|(tier, mask, block_tokens, hashes)| Push::Report { tier, mask, block_tokens, hashes });
        let revoke = (tier, hashes).prop_map(|(tier, hashes)| Push::Revoke { tier, hashes });
        prop::collection::vec(prop_oneof![5 => report, 3 => revoke, 1 => Just(Push::Clear)], 0..30)
    }

    proptest! {
        #[test]
        fn order_bounds_and_alignment_hold(
            pushes in pushes(),
            actions_max in 1_usize..5,
            hashes_max in 1_usize..12,
            pop_every in 1_usize..8,
        ) {
            let mut chunker = Chunker::with_bounds(actions_max, hashes_max);
            let mut rpcs = Vec::new();
            for (index, pushed) in pushes.iter().enumerate() {
                push(&mut chunker, pushed);
                if index % pop_every == 0 {
                    rpcs.extend(chunker.pop());
                }
            }
            while !chunker.is_empty() {
                rpcs.extend(chunker.pop());
            }
            prop_assert_eq!(chunker.bytes(), 0);
            for rpc in &rpcs {
                prop_assert!((1..=actions_max).contains(&rpc.len()));
                prop_assert!(rpc.iter().map(|action| action.hashes.len()).sum::<usize>() <= hashes_max);
                for action in rpc {
                    let length = action.hashes.len();
                    prop_assert_eq!(length == 0, action.r#type() == Type::ActionClearAllAtTier);
                    for column in [&action.component_masks, &action.block_sizes] {
                        prop_assert!(column.is_empty() || column.len() == length);
                        prop_assert!(column.is_empty() || column.iter().any(|value| *value != 0));
                    }
                }
            }
            let mut again = Chunker::with_bounds(actions_max, hashes_max);
            rpcs.iter().for_each(|rpc| again.extend(rpc));
            let copied: Vec<_> = std::iter::from_fn(|| again.pop()).flatten().collect();
            let expected: Vec<Step> = pushes.iter().flat_map(steps_of_push).collect();
            prop_assert_eq!(copied.iter().flat_map(steps_of_action).collect::<Vec<_>>(), expected.clone());
            let packed: Vec<Step> = rpcs.iter().flatten().flat_map(steps_of_action).collect();
            prop_assert_eq!(reduce(&packed), reduce(&expected));
            prop_assert_eq!(packed, expected);
        }
    }

    #[test]
    fn neighbours_join_and_a_long_list_goes_on_in_the_next_rpc() {
        let mut chunker = Chunker::default();
        chunker.report(Tier::TierHbm, 0, 16, 0..30_000);
        chunker.report(Tier::TierHbm, 3, 0, 30_000..60_000);
        chunker.revoke(Tier::TierHbm, 0..10);
        chunker.revoke(Tier::TierHbm, 10..20);
        chunker.revoke(Tier::TierDram, 0..10);
        let rpcs: Vec<_> = std::iter::from_fn(|| chunker.pop()).collect();
        let shape: Vec<Vec<usize>> =
            rpcs.iter().map(|rpc| rpc.iter().map(|action| action.hashes.len()).collect()).collect();
        assert_eq!(shape, [vec![16_384], vec![16_384], vec![16_384], vec![10_848, 20, 10]]);
        assert!(rpcs[0][0].component_masks.is_empty());
        assert_eq!(rpcs[1][0].component_masks[30_000 - 16_384 - 1..][..2], [0, 3]);
        assert_eq!(rpcs[1][0].block_sizes[30_000 - 16_384 - 1..][..2], [16, 0]);
    }

    #[test]
    fn actions_that_cannot_join_fill_rpcs_of_256() {
        let mut chunker = Chunker::default();
        for index in 0..300 {
            chunker.report(Tier::TierHbm, 0, 16, std::iter::once(index));
            chunker.revoke(Tier::TierHbm, std::iter::once(index));
        }
        let actions: Vec<_> = std::iter::from_fn(|| chunker.pop()).map(|rpc| rpc.len()).collect();
        assert_eq!(actions, [256, 256, 88]);
    }
}
