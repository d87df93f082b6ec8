//! `verify`: a server against what it should hold after a recording.
//!
//! The recording is put into an index of this process, as a bridge would report it, and
//! every block that it ever named is looked up in both. Other workers of the server do
//! not matter. What the contract cannot be asked, blocks that the recording never
//! named, is not found.
//!
//! Memory: the distinct blocks of the recording, and an index of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use clap::Args;
use serde_json::{Value, json};

use super::asking::tier_name;
use super::feed::{Feed, FeedArguments, Feeds};
use super::output::{self, Table};
use super::recording::Recording;
use super::remote::{ServerArguments, failed};
use super::{Environment, Failure, Outcome};
use crate::arena::{Action, Batch, CacheSpec, Index, PackedHashes, Tier};
use crate::pb::{ApplyExternalKvBatchRequest, ExternalKvActionType as Kind, MatchExternalKvRequest};
use crate::scan::lookup;

/// Blocks that are looked up at once: answers grow with the server's workers too.
const LOOKED_UP_AT_ONCE: usize = 2_048;

/// Changes that are gathered before they are applied.
const GATHERED_BYTES: usize = 256 * 1024;

/// Differences that are listed unless all are wanted.
const LISTED: usize = 20;

#[derive(Debug, Args)]
pub(super) struct Verify {
    /// A recording, or a capture in lines of JSON.
    file: PathBuf,
    #[command(flatten)]
    feed: FeedArguments,
    #[command(flatten)]
    server: ServerArguments,
    /// Lists every difference.
    #[arg(long)]
    all: bool,
    /// Writes JSON, with every difference.
    #[arg(long)]
    json: bool,
}

/// Where a worker keeps a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    hash: i64,
    tier: i32,
}

/// What is there: components and tokens.
type Held = BTreeMap<(String, Place), (u32, u32)>;

/// One place at which the two differ.
struct Difference {
    worker: String,
    place: Place,
    what: String,
}

impl Verify {
    pub(super) async fn run(self, environment: &mut Environment<'_>) -> Result<Outcome, Failure> {
        let mut client = self.server.client(environment)?;
        let recording = Recording::open(&self.file)?;
        let index = Index::new();
        let mut named = BTreeSet::new();
        let mut feeds = Feeds::new(self.feed)?;
        let reading = recording.progress.clone();
        for entry in recording {
            let entry = entry?;
            let Some(feed) = feeds.of(&entry.stream)? else { continue };
            feed.take(&entry.what);
            if feed.waiting() >= GATHERED_BYTES {
                apply(feed, &index, &mut named)?;
            }
        }
        let mut workers = BTreeSet::new();
        for feed in feeds.all() {
            apply(feed, &index, &mut named)?;
            workers.insert(feed.worker().to_owned());
        }
        reading.finish_and_clear();
        let named: Vec<i64> = named.into_iter().collect();
        let progress = output::progress(named.len() as u64, "blocks compared");
        let (mut held, mut differences) = (0, Vec::new());
        for part in named.chunks(LOOKED_UP_AT_ONCE) {
            let expected = expected(&index, part);
            let request = MatchExternalKvRequest { hashes: part.to_vec(), count_as_hit: false };
            let answer = client.match_external_kv(request).await.map_err(|status| failed(&status))?;
            let mut found = Held::new();
            for node in answer.into_inner().matches {
                if !workers.contains(&node.worker_id) {
                    continue;
                }
                for row in node.hashes_by_tier {
                    for (at, &hash) in row.hashes.iter().enumerate() {
                        let number = |column: &[u32]| column.get(at).copied().unwrap_or(0);
                        let value = (number(&row.component_masks), number(&row.block_sizes));
                        found.insert((node.worker_id.clone(), Place { hash, tier: row.tier }), value);
                    }
                }
            }
            held += expected.len();
            compare(&expected, &found, &mut differences);
            progress.inc(part.len() as u64);
        }
        progress.finish_and_clear();
        if self.json {
            let rows: Vec<Value> = differences.iter().map(difference_json).collect();
            let value = json!({"blocks": named.len(), "placements": held, "differences": rows});
            output::json(environment.out, &value)?;
        } else {
            if !differences.is_empty() {
                let mut table = Table::new(&["worker", "tier", "block", "difference"]);
                for found in differences.iter().take(if self.all { usize::MAX } else { LISTED }) {
                    let Difference { worker, place, what } = found;
                    let (tier, hash) = (tier_name(place.tier), place.hash.to_string());
                    table.row([worker.clone(), tier, hash, what.clone()]);
                }
                table.write(environment.out)?;
            }
            let (blocks, count) = (named.len(), differences.len());
            writeln!(environment.out, "{blocks} blocks, {held} placements, {count} differences")?;
        }
        Ok(Outcome::found(differences.is_empty()))
    }
}

/// Puts all that waits into the index, and notes the blocks it names.
fn apply(feed: &mut Feed, index: &Index, named: &mut BTreeSet<i64>) -> Result<(), Failure> {
    while let Some(report) = feed.report() {
        named.extend(report.actions.iter().flat_map(|action| action.hashes.iter().copied()));
        put(&report, index)?;
    }
    Ok(())
}

fn put(report: &ApplyExternalKvBatchRequest, index: &Index) -> Result<(), Failure> {
    let packed: Vec<Vec<u8>> =
        report.actions.iter().map(|action| PackedHashes::pack(&action.hashes)).collect();
    let actions = report.actions.iter().zip(&packed).filter_map(|(action, packed)| {
        let (tier, hashes) = (Tier::from_wire(action.tier)?, PackedHashes::new(packed)?);
        Some(match action.r#type() {
            Kind::ActionReport => {
                Action::Report { tier, hashes, masks: &action.component_masks, tokens: &action.block_sizes }
            }
            Kind::ActionRevoke => Action::Revoke { tier, hashes },
            Kind::ActionClearAllAtTier => Action::ClearTier { tier },
            Kind::ActionUnknown => return None,
        })
    });
    let batch = Batch {
        worker_id: &report.worker_id,
        worker_address: &report.worker_address,
        cache_spec: report.cache_spec.map(|spec| CacheSpec {
            version: spec.version,
            components: spec.components,
            swa_window_tokens: spec.swa_window_tokens,
            full_tier_mask: spec.full_tier_mask,
            swa_tier_mask: spec.swa_tier_mask,
            mamba_tier_mask: spec.mamba_tier_mask,
        }),
        seq: report.seq,
        actions: &actions.collect::<Vec<_>>(),
    };
    index.apply(&batch).map_err(|error| Failure::Input(error.to_string()))
}

/// What the recording leaves of these blocks.
fn expected(index: &Index, hashes: &[i64]) -> Held {
    let packed = PackedHashes::pack(hashes);
    let Some(packed) = PackedHashes::new(&packed) else { return Held::new() };
    let (found, labels) = {
        let view = index.read();
        (lookup::find_blocks(&view, packed, false), view.labels())
    };
    let found = found.by_worker();
    let mut held = Held::new();
    for row in &found.workers {
        let Some(label) = labels.get(row.worker) else { continue };
        for tier in &row.tiers {
            for (&position, &mask) in tier.positions.iter().zip(&tier.masks) {
                let place = Place { hash: hashes[position as usize], tier: tier.tier.wire() };
                held.insert((label.id().to_owned(), place), (mask, found.tokens[position as usize]));
            }
        }
    }
    held
}

/// Notes where the two differ. Tokens are the block's: another worker may know them, so only known ones can differ.
fn compare(expected: &Held, found: &Held, differences: &mut Vec<Difference>) {
    let mut note = |(worker, place): &(String, Place), what: String| {
        differences.push(Difference { worker: worker.clone(), place: *place, what });
    };
    for (key, (mask, tokens)) in expected {
        match found.get(key) {
            None => note(key, "missing on the server".to_owned()),
            Some((found, _)) if found != mask => {
                note(key, format!("components {found} on the server, {mask} in the recording"));
            }
            Some((_, found)) if *tokens != 0 && found != tokens => {
                note(key, format!("{found} tokens on the server, {tokens} in the recording"));
            }
            Some(_) => {}
        }
    }
    for key in found.keys().filter(|key| !expected.contains_key(*key)) {
        note(key, "only on the server".to_owned());
    }
}

fn difference_json(difference: &Difference) -> Value {
    let Difference { worker, place, what } = difference;
    json!({"worker": worker, "tier": tier_name(place.tier), "block": output::hash(place.hash), "difference": what})
}
