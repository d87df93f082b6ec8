//! The four requests.
//!
//! Each is read in one pass over its bytes, then checked as a whole. A request
//! that exists is valid, so its translation to what the index takes cannot fail.

use bytes::Bytes;
use prost::encoding::{DecodeContext, WireType, bool, int32, string, uint32, uint64};

use super::field::{HashList, Room, delimited, each, merge_numbers};
use super::{FromWire, RequestError};
use crate::arena::{Action, Batch, CacheSpec, PackedHashes, Tier};
use crate::limits::{ACTIONS_PER_APPLY_MAX, HASHES_PER_CALL_MAX};

/// `ApplyExternalKvBatchRequest`.
#[derive(Debug)]
pub(crate) struct ApplyRequest {
    worker_id: String,
    worker_address: String,
    seq: u64,
    cache_spec: Option<CacheSpec>,
    actions: Vec<CheckedAction>,
}

impl ApplyRequest {
    /// The actions as the index takes them.
    pub(in crate::server) fn actions(&self) -> Vec<Action<'_>> {
        self.actions.iter().map(CheckedAction::borrow).collect()
    }

    /// The batch as the index takes it, around what [`ApplyRequest::actions`] gave.
    pub(in crate::server) fn batch<'a>(&'a self, actions: &'a [Action<'a>]) -> Batch<'a> {
        Batch {
            worker_id: &self.worker_id,
            worker_address: &self.worker_address,
            cache_spec: self.cache_spec,
            seq: self.seq,
            actions,
        }
    }

    /// Hashes over all actions that use them: what the apply will cost.
    pub(in crate::server) fn hashes(&self) -> usize {
        self.actions.iter().map(CheckedAction::hashes).sum()
    }
}

impl FromWire for ApplyRequest {
    fn from_wire(bytes: Bytes) -> Result<Self, RequestError> {
        let (mut worker_id, mut worker_address) = (String::new(), String::new());
        let mut seq = 0;
        let mut cache_spec = None;
        let mut actions = Vec::new();
        let mut actions_room = Room::new(ACTIONS_PER_APPLY_MAX, RequestError::TooManyActions);
        let mut rooms = Rooms::new();
        each(bytes, |tag, wire_type, source| {
            match tag {
                1 => string::merge(wire_type, &mut worker_id, source, context())?,
                2 => uint64::merge(wire_type, &mut seq, source, context())?,
                3 => {
                    let message = delimited(wire_type, source)?;
                    actions_room.take(1)?;
                    actions.push(RawAction::read(message, &mut rooms)?);
                }
                4 => string::merge(wire_type, &mut worker_address, source, context())?,
                6 => read_spec(delimited(wire_type, source)?, cache_spec.get_or_insert(NO_SPEC))?,
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        if worker_id.is_empty() {
            return Err(RequestError::EmptyWorkerId);
        }
        let actions = actions.into_iter().enumerate().map(|(place, action)| action.check(place));
        let actions = actions.collect::<Result<_, _>>()?;
        Ok(ApplyRequest { worker_id, worker_address, seq, cache_spec, actions })
    }
}

/// A spec whose fields have not come yet.
const NO_SPEC: CacheSpec = CacheSpec {
    version: 0,
    components: 0,
    swa_window_tokens: 0,
    full_tier_mask: 0,
    swa_tier_mask: 0,
    mamba_tier_mask: 0,
};

/// Merges a `WorkerCacheSpec` into `spec`, as protobuf asks when it comes in pieces.
fn read_spec(message: Bytes, spec: &mut CacheSpec) -> Result<(), RequestError> {
    each(message, |tag, wire_type, source| {
        let value = match tag {
            1 => &mut spec.version,
            2 => &mut spec.components,
            3 => &mut spec.swa_window_tokens,
            4 => &mut spec.full_tier_mask,
            5 => &mut spec.swa_tier_mask,
            6 => &mut spec.mamba_tier_mask,
            _ => return Ok(false),
        };
        uint32::merge(wire_type, value, source, context())?;
        Ok(true)
    })
}

/// What is left of the bounds over all actions of an apply.
struct Rooms {
    hashes: Room,
    masks: Room,
    sizes: Room,
}

impl Rooms {
    fn new() -> Self {
        let metadata = |field| Room::new(HASHES_PER_CALL_MAX, RequestError::TooMuchMetadata { field });
        Rooms { hashes: hashes_room(), masks: metadata(MASKS), sizes: metadata(SIZES) }
    }
}

const MASKS: &str = "component_masks";
const SIZES: &str = "block_sizes";

/// An `ExternalKvAction` as it was read.
#[derive(Default)]
struct RawAction {
    kind: i32,
    tier: i32,
    hashes: HashList,
    masks: Vec<u32>,
    sizes: Vec<u32>,
}

impl RawAction {
    fn read(message: Bytes, rooms: &mut Rooms) -> Result<Self, RequestError> {
        let mut action = RawAction::default();
        each(message, |tag, wire_type, source| {
            match tag {
                1 => int32::merge(wire_type, &mut action.kind, source, context())?,
                2 => int32::merge(wire_type, &mut action.tier, source, context())?,
                3 => action.hashes.merge(&mut rooms.hashes, wire_type, source)?,
                4 => merge_numbers(&mut action.masks, &mut rooms.masks, wire_type, source)?,
                5 => merge_numbers(&mut action.sizes, &mut rooms.sizes, wire_type, source)?,
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        Ok(action)
    }

    /// The action at `place` of its batch, if it obeys the contract.
    fn check(self, place: usize) -> Result<CheckedAction, RequestError> {
        let RawAction { kind, tier, hashes, masks, sizes } = self;
        let tier = Tier::from_wire(tier).ok_or(RequestError::UnknownTier { action: place, tier })?;
        let kind = Kind::from_wire(kind).ok_or(RequestError::UnknownType { action: place, kind })?;
        if hashes.is_empty() && kind != Kind::ClearTier {
            return Err(RequestError::NoActionHashes { action: place });
        }
        for (field, values) in [(MASKS, masks.len()), (SIZES, sizes.len())] {
            if values != 0 && values != hashes.len() {
                let hashes = hashes.len();
                return Err(RequestError::MetadataLength { action: place, field, values, hashes });
            }
        }
        Ok(match kind {
            Kind::Report => CheckedAction::Report { tier, hashes, masks, sizes },
            Kind::Revoke => CheckedAction::Revoke { tier, hashes },
            Kind::ClearTier => CheckedAction::ClearTier { tier },
        })
    }
}

/// `ExternalKvActionType`, without the unknown one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Report,
    Revoke,
    ClearTier,
}

impl Kind {
    fn from_wire(number: i32) -> Option<Self> {
        match number {
            1 => Some(Kind::Report),
            2 => Some(Kind::Revoke),
            3 => Some(Kind::ClearTier),
            _ => None,
        }
    }
}

/// An action that obeys the contract, holding its bytes.
#[derive(Debug)]
enum CheckedAction {
    Report { tier: Tier, hashes: HashList, masks: Vec<u32>, sizes: Vec<u32> },
    Revoke { tier: Tier, hashes: HashList },
    ClearTier { tier: Tier },
}

impl CheckedAction {
    fn borrow(&self) -> Action<'_> {
        match self {
            CheckedAction::Report { tier, hashes, masks, sizes } => {
                Action::Report { tier: *tier, hashes: hashes.packed(), masks, tokens: sizes }
            }
            CheckedAction::Revoke { tier, hashes } => Action::Revoke { tier: *tier, hashes: hashes.packed() },
            CheckedAction::ClearTier { tier } => Action::ClearTier { tier: *tier },
        }
    }

    fn hashes(&self) -> usize {
        match self {
            CheckedAction::Report { hashes, .. } | CheckedAction::Revoke { hashes, .. } => hashes.len(),
            CheckedAction::ClearTier { .. } => 0,
        }
    }
}

/// `MatchExternalKvPrefixRequest`.
#[derive(Debug)]
pub(crate) struct PrefixRequest {
    hashes: HashList,
    blocks_max: u32,
}

impl PrefixRequest {
    /// The leading hashes to look at.
    pub(in crate::server) fn hashes(&self) -> PackedHashes<'_> {
        match self.blocks_max {
            0 => self.hashes.packed(),
            blocks => self.hashes.packed().first(usize::try_from(blocks).unwrap_or(usize::MAX)),
        }
    }
}

impl FromWire for PrefixRequest {
    fn from_wire(bytes: Bytes) -> Result<Self, RequestError> {
        let mut blocks_max = 0;
        // Bounded by the largest message alone.
        let room = Room::new(usize::MAX, RequestError::TooManyHashes);
        let hashes = read_query(bytes, room, |tag, wire_type, source| match tag {
            2 => {
                uint32::merge(wire_type, &mut blocks_max, source, context())?;
                Ok(true)
            }
            _ => Ok(false),
        })?;
        Ok(PrefixRequest { hashes, blocks_max })
    }
}

/// `MatchExternalKvRequest`.
#[derive(Debug)]
pub(crate) struct MatchRequest {
    hashes: HashList,
    count_as_hit: bool,
}

impl MatchRequest {
    pub(in crate::server) fn hashes(&self) -> PackedHashes<'_> {
        self.hashes.packed()
    }

    pub(in crate::server) fn count_as_hit(&self) -> bool {
        self.count_as_hit
    }
}

impl FromWire for MatchRequest {
    fn from_wire(bytes: Bytes) -> Result<Self, RequestError> {
        let mut count_as_hit = false;
        let hashes = read_query(bytes, hashes_room(), |tag, wire_type, source| match tag {
            2 => {
                bool::merge(wire_type, &mut count_as_hit, source, context())?;
                Ok(true)
            }
            _ => Ok(false),
        })?;
        Ok(MatchRequest { hashes, count_as_hit })
    }
}

/// `GetExternalKvHitCountsRequest`.
#[derive(Debug)]
pub(crate) struct HitCountsRequest {
    hashes: HashList,
}

impl HitCountsRequest {
    pub(in crate::server) fn hashes(&self) -> PackedHashes<'_> {
        self.hashes.packed()
    }
}

impl FromWire for HitCountsRequest {
    fn from_wire(bytes: Bytes) -> Result<Self, RequestError> {
        let hashes = read_query(bytes, hashes_room(), |_, _, _| Ok(false))?;
        Ok(HitCountsRequest { hashes })
    }
}

/// Reads a query: its hashes are field 1, what else it has is for `read_other`.
fn read_query(
    bytes: Bytes,
    mut room: Room,
    mut read_other: impl FnMut(u32, WireType, &mut Bytes) -> Result<bool, RequestError>,
) -> Result<HashList, RequestError> {
    let mut hashes = HashList::default();
    each(bytes, |tag, wire_type, source| match tag {
        1 => hashes.merge(&mut room, wire_type, source).map(|()| true),
        _ => read_other(tag, wire_type, source),
    })?;
    if hashes.is_empty() { Err(RequestError::NoHashes) } else { Ok(hashes) }
}

fn hashes_room() -> Room {
    Room::new(HASHES_PER_CALL_MAX, RequestError::TooManyHashes)
}

fn context() -> DecodeContext {
    DecodeContext::default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;

    use super::*;
    use crate::pb;

    fn action(kind: i32, tier: i32, hashes: Vec<i64>) -> pb::ExternalKvAction {
        pb::ExternalKvAction { r#type: kind, tier, hashes, ..Default::default() }
    }

    fn apply(actions: Vec<pb::ExternalKvAction>) -> pb::ApplyExternalKvBatchRequest {
        pb::ApplyExternalKvBatchRequest {
            worker_id: "w".into(),
            seq: u64::MAX,
            actions,
            worker_address: "http://w".into(),
            cache_spec: None,
        }
    }

    fn read_apply(message: &pb::ApplyExternalKvBatchRequest) -> Result<ApplyRequest, RequestError> {
        ApplyRequest::from_wire(message.encode_to_vec().into())
    }

    /// What prost reads must be what we read, or be refused by a rule of the contract.
    fn same_as_prost(bytes: &[u8]) {
        let bytes = Bytes::copy_from_slice(bytes);
        let malformed = |error: &RequestError| {
            matches!(
                error,
                RequestError::Malformed(_) | RequestError::Truncated | RequestError::RaggedHashes { .. }
            )
        };
        let theirs = pb::ApplyExternalKvBatchRequest::decode(bytes.clone());
        match (ApplyRequest::from_wire(bytes.clone()), theirs) {
            (Ok(ours), Ok(theirs)) => same_apply(&ours, &theirs),
            (Ok(ours), Err(error)) => panic!("{ours:?} from malformed bytes: {error}"),
            (Err(error), Ok(_)) => assert!(!malformed(&error), "{error}"),
            (Err(_), Err(_)) => {}
        }
        let theirs = pb::MatchExternalKvPrefixRequest::decode(bytes.clone());
        match (PrefixRequest::from_wire(bytes.clone()), theirs) {
            (Ok(ours), Ok(theirs)) => {
                assert!(ours.hashes.packed().iter().eq(theirs.hashes));
                assert_eq!(ours.blocks_max, theirs.max_blocks);
            }
            (Ok(ours), Err(error)) => panic!("{ours:?} from malformed bytes: {error}"),
            (Err(error), Ok(_)) => assert_eq!(error, RequestError::NoHashes),
            (Err(_), Err(_)) => {}
        }
        let theirs = pb::MatchExternalKvRequest::decode(bytes.clone());
        match (MatchRequest::from_wire(bytes.clone()), theirs) {
            (Ok(ours), Ok(theirs)) => {
                assert!(ours.hashes().iter().eq(theirs.hashes));
                assert_eq!(ours.count_as_hit(), theirs.count_as_hit);
            }
            (Ok(ours), Err(error)) => panic!("{ours:?} from malformed bytes: {error}"),
            (Err(error), Ok(_)) => assert!(!malformed(&error), "{error}"),
            (Err(_), Err(_)) => {}
        }
        let theirs = pb::GetExternalKvHitCountsRequest::decode(bytes.clone());
        if let (Ok(ours), Ok(theirs)) = (HitCountsRequest::from_wire(bytes), theirs) {
            assert!(ours.hashes().iter().eq(theirs.hashes));
        }
    }

    fn same_apply(ours: &ApplyRequest, theirs: &pb::ApplyExternalKvBatchRequest) {
        let actions = ours.actions();
        let batch = ours.batch(&actions);
        assert_eq!(batch.worker_id, theirs.worker_id);
        assert_eq!(batch.worker_address, theirs.worker_address);
        assert_eq!(batch.seq, theirs.seq);
        let spec = theirs.cache_spec.map(|spec| CacheSpec {
            version: spec.version,
            components: spec.components,
            swa_window_tokens: spec.swa_window_tokens,
            full_tier_mask: spec.full_tier_mask,
            swa_tier_mask: spec.swa_tier_mask,
            mamba_tier_mask: spec.mamba_tier_mask,
        });
        assert_eq!(batch.cache_spec, spec);
        assert_eq!(batch.actions.len(), theirs.actions.len());
        for (ours, theirs) in batch.actions.iter().zip(&theirs.actions) {
            let (kind, tier, hashes, masks, sizes): (_, _, _, &[u32], &[u32]) = match *ours {
                Action::Report { tier, hashes, masks, tokens } => (1, tier, Some(hashes), masks, tokens),
                Action::Revoke { tier, hashes } => {
                    (2, tier, Some(hashes), &theirs.component_masks, &theirs.block_sizes)
                }
                Action::ClearTier { tier } => (3, tier, None, &theirs.component_masks, &theirs.block_sizes),
            };
            assert_eq!((kind, tier.wire()), (theirs.r#type, theirs.tier));
            assert!(hashes.is_none_or(|hashes| hashes.iter().eq(theirs.hashes.iter().copied())));
            assert_eq!((masks, sizes), (&theirs.component_masks[..], &theirs.block_sizes[..]));
        }
    }

    fn any_spec() -> impl Strategy<Value = pb::WorkerCacheSpec> {
        any::<[u32; 6]>().prop_map(|values| pb::WorkerCacheSpec {
            version: values[0],
            components: values[1],
            swa_window_tokens: values[2],
            full_tier_mask: values[3],
            swa_tier_mask: values[4],
            mamba_tier_mask: values[5],
        })
    }

    fn any_action() -> impl Strategy<Value = pb::ExternalKvAction> {
        let numbers = (0_i32..5, 0_i32..5);
        (numbers, prop::collection::vec((any::<i64>(), any::<u32>(), any::<u32>()), 0..5), 0..4).prop_map(
            |((kind, tier), blocks, metadata)| {
                let masks = blocks.iter().map(|block| block.1).filter(|_| metadata & 1 != 0);
                let sizes = blocks.iter().map(|block| block.2).filter(|_| metadata & 2 != 0);
                pb::ExternalKvAction {
                    r#type: kind,
                    tier,
                    component_masks: masks.collect(),
                    block_sizes: sizes.collect(),
                    hashes: blocks.iter().map(|block| block.0).collect(),
                }
            },
        )
    }

    fn any_apply() -> impl Strategy<Value = pb::ApplyExternalKvBatchRequest> {
        let names = ("[a-zé]{0,3}", "[a-zé]{0,3}");
        let actions = prop::collection::vec(any_action(), 0..4);
        (names, any::<u64>(), actions, prop::option::of(any_spec())).prop_map(
            |((worker_id, worker_address), seq, actions, cache_spec)| pb::ApplyExternalKvBatchRequest {
                worker_id,
                seq,
                actions,
                worker_address,
                cache_spec,
            },
        )
    }

    proptest! {
        #[test]
        fn random_bytes_are_read_as_prost_reads_them(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            same_as_prost(&bytes);
        }

        #[test]
        fn messages_whole_cut_joined_and_spoilt_are_read_as_prost_reads_them(
            first in any_apply(),
            second in any_apply(),
            spoilt in any::<(prop::sample::Index, u8)>(),
        ) {
            let mut bytes = first.encode_to_vec();
            for end in 0..=bytes.len() {
                same_as_prost(&bytes[..end]);
            }
            // Two messages in a row are one that has every field twice.
            bytes.extend(second.encode_to_vec());
            same_as_prost(&bytes);
            if !bytes.is_empty() {
                let place = spoilt.0.index(bytes.len());
                bytes[place] = spoilt.1;
                same_as_prost(&bytes);
            }
        }
    }

    #[test]
    fn a_valid_batch_of_every_kind_is_taken() {
        let mut report = action(1, 1, vec![1, -2]);
        report.component_masks = vec![9, 0];
        report.block_sizes = vec![0, 64];
        let mut message = apply(vec![report, action(2, 2, vec![3]), action(3, 3, vec![])]);
        message.cache_spec = Some(pb::WorkerCacheSpec { components: 3, ..Default::default() });
        let request = read_apply(&message).expect("valid");
        same_apply(&request, &message);
        assert_eq!(request.hashes(), 3);
        assert!(read_apply(&apply(vec![])).is_ok());
    }

    #[test]
    fn each_rule_of_a_batch_is_checked() {
        let metadata = |kind, hashes, masks, sizes| {
            let mut action = action(kind, 1, vec![1; hashes]);
            action.component_masks = vec![1; masks];
            action.block_sizes = vec![1; sizes];
            action
        };
        let cases = [
            (action(1, 0, vec![1]), "action 1: unknown tier 0"),
            (action(9, 4, vec![1]), "action 1: unknown tier 4"),
            (action(1, -1, vec![1]), "action 1: unknown tier -1"),
            (action(0, 1, vec![1]), "action 1: unknown type 0"),
            (action(4, 1, vec![]), "action 1: unknown type 4"),
            (action(1, 1, vec![]), "action 1: no hashes"),
            (action(2, 1, vec![]), "action 1: no hashes"),
            (metadata(1, 2, 1, 0), "action 1: 1 component_masks for 2 hashes"),
            (metadata(1, 2, 2, 3), "action 1: 3 block_sizes for 2 hashes"),
            (metadata(2, 1, 2, 0), "action 1: 2 component_masks for 1 hashes"),
            (metadata(3, 0, 0, 1), "action 1: 1 block_sizes for 0 hashes"),
        ];
        for (bad, expected) in cases {
            let error = read_apply(&apply(vec![action(1, 1, vec![1]), bad])).unwrap_err();
            assert_eq!(error.to_string(), expected);
        }
        let nameless = pb::ApplyExternalKvBatchRequest { worker_id: String::new(), ..apply(vec![]) };
        assert_eq!(read_apply(&nameless).unwrap_err(), RequestError::EmptyWorkerId);
    }

    #[test]
    fn bounds_hold_over_the_whole_batch() {
        let full = vec![action(3, 1, vec![]); ACTIONS_PER_APPLY_MAX];
        assert!(read_apply(&apply(full.clone())).is_ok());
        let over = [full, vec![action(0, 0, vec![])]].concat();
        assert_eq!(read_apply(&apply(over)).unwrap_err(), RequestError::TooManyActions);

        let split = |first: usize, second: usize| {
            apply(vec![action(1, 1, vec![7; first]), action(2, 1, vec![7; second])])
        };
        assert!(read_apply(&split(HASHES_PER_CALL_MAX - 1, 1)).is_ok());
        let error = read_apply(&split(HASHES_PER_CALL_MAX - 1, 2)).unwrap_err();
        assert_eq!(error, RequestError::TooManyHashes);

        let mut heavy = action(1, 1, vec![7]);
        heavy.block_sizes = vec![1; HASHES_PER_CALL_MAX + 1];
        let error = read_apply(&apply(vec![heavy])).unwrap_err();
        assert_eq!(error, RequestError::TooMuchMetadata { field: SIZES });
    }

    #[test]
    fn a_bound_bites_before_what_follows_is_read() {
        // After 256 actions comes one more and then no protobuf at all.
        let mut bytes = [0x1a, 0].repeat(ACTIONS_PER_APPLY_MAX + 1);
        bytes.extend([0xff; 64]);
        assert_eq!(ApplyRequest::from_wire(bytes.into()).unwrap_err(), RequestError::TooManyActions);
    }

    #[test]
    fn queries_have_their_bounds() {
        let query = |count: usize| pb::MatchExternalKvRequest { hashes: vec![5; count], count_as_hit: true };
        let read = |count| MatchRequest::from_wire(query(count).encode_to_vec().into());
        assert_eq!(read(0).unwrap_err(), RequestError::NoHashes);
        assert_eq!(read(HASHES_PER_CALL_MAX).expect("within the bound").hashes().len(), HASHES_PER_CALL_MAX);
        assert_eq!(read(HASHES_PER_CALL_MAX + 1).unwrap_err(), RequestError::TooManyHashes);
        // Field 1 of both queries is the same, so its bytes serve for the other two.
        let many = Bytes::from(query(HASHES_PER_CALL_MAX + 1).encode_to_vec());
        let error = HitCountsRequest::from_wire(many.clone()).unwrap_err();
        assert_eq!(error, RequestError::TooManyHashes);
        assert!(PrefixRequest::from_wire(many).is_ok());
        assert_eq!(HitCountsRequest::from_wire(Bytes::new()).unwrap_err(), RequestError::NoHashes);
        assert_eq!(PrefixRequest::from_wire(Bytes::new()).unwrap_err(), RequestError::NoHashes);
    }

    #[test]
    fn a_prefix_query_looks_no_further_than_asked() {
        for (asked, looked_at) in [(0, 3), (1, 1), (3, 3), (u32::MAX, 3)] {
            let message = pb::MatchExternalKvPrefixRequest { hashes: vec![1, 2, 3], max_blocks: asked };
            let request = PrefixRequest::from_wire(message.encode_to_vec().into()).expect("valid");
            assert_eq!(request.hashes().len(), looked_at, "max_blocks {asked}");
        }
    }
}
