//! The index as it is shown: sizes, and what each worker holds.
//!
//! Sizes walk all chunks and holdings walk all bitmaps, so a snapshot is taken
//! at most every [`AGE_MAX`], however many ask, and the lock is let go between the
//! sizes and every few workers: nobody waits for more than one of these steps.
//! Workers that came or went meanwhile are in the next snapshot.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::fleet::Heard;
use super::record::Recorder;
use crate::arena::{CacheSpec, Index, Label, Labels, Sizes, Tier, WorkerId};

/// How old a snapshot may be when it is shown.
const AGE_MAX: Duration = Duration::from_secs(1);

/// Workers that are looked at while the lock is held.
const WORKERS_AT_ONCE: usize = 64;

/// Most workers with a row and series of their own, so that a peer who invents
/// workers cannot make every scrape long. Totals count all of them.
pub(super) const WORKERS_SHOWN_MAX: usize = 2_048;

/// All tiers in the order of the rows.
pub(super) const TIERS: [(Tier, &str); 3] = [(Tier::Hbm, "HBM"), (Tier::Dram, "DRAM"), (Tier::Ssd, "SSD")];

/// The index at about one moment.
#[derive(Debug)]
pub(super) struct Snapshot {
    pub(super) sizes: Sizes,
    /// Placements by tier, of all workers.
    pub(super) placements: [u64; 3],
    /// Workers that are left out of answers.
    pub(super) silent: usize,
    /// The first workers, at most [`WORKERS_SHOWN_MAX`].
    pub(super) workers: Vec<WorkerRow>,
    labels: Labels,
    taken: Instant,
}

/// One worker.
#[derive(Debug)]
pub(super) struct WorkerRow {
    id: WorkerId,
    pub(super) spec: Option<CacheSpec>,
    pub(super) seq: u64,
    /// Whether it is left out of answers, as it has not been heard for too long.
    pub(super) silent: bool,
    /// Blocks by tier.
    pub(super) blocks: [u64; 3],
    pub(super) heard: Option<Heard>,
}

impl Snapshot {
    /// The shown workers with their names.
    pub(super) fn rows(&self) -> impl Iterator<Item = (&Label, &WorkerRow)> {
        self.workers.iter().filter_map(|row| Some((self.labels.get(row.id)?, row)))
    }
}

/// Takes snapshots, no more often than they are worth.
#[derive(Debug)]
pub(super) struct Snapshots {
    index: Arc<Index>,
    recorder: Arc<Recorder>,
    last: Mutex<Option<Arc<Snapshot>>>,
}

impl Snapshots {
    pub(super) fn new(index: Arc<Index>, recorder: Arc<Recorder>) -> Self {
        Snapshots { index, recorder, last: Mutex::new(None) }
    }

    /// One that is not older than [`AGE_MAX`].
    pub(super) fn get(&self) -> Arc<Snapshot> {
        // Held while one is taken, so that others who ask meanwhile get the same.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(snapshot) = last.as_ref().filter(|snapshot| snapshot.taken.elapsed() < AGE_MAX) {
            return Arc::clone(snapshot);
        }
        let snapshot = Arc::new(take(&self.index, &self.recorder));
        *last = Some(Arc::clone(&snapshot));
        snapshot
    }
}

fn take(index: &Index, recorder: &Recorder) -> Snapshot {
    let (sizes, labels, ids) = {
        let view = index.read();
        (view.sizes(), view.labels(), view.workers().collect::<Vec<_>>())
    };
    let (mut placements, mut silent) = ([0; 3], 0);
    let mut workers = Vec::with_capacity(ids.len().min(WORKERS_SHOWN_MAX));
    for some in ids.chunks(WORKERS_AT_ONCE) {
        let view = index.read();
        for &id in some {
            // It may have gone since its id was listed, and the id may be another's by now.
            let is_same = labels.get(id).is_some_and(|label| view.find_worker(label.id()) == Some(id));
            if !is_same {
                continue;
            }
            let blocks = TIERS.map(|(tier, _)| view.holdings(id, tier));
            placements.iter_mut().zip(blocks).for_each(|(sum, blocks)| *sum += blocks);
            silent += usize::from(view.is_silent(id));
            if workers.len() < WORKERS_SHOWN_MAX {
                let (spec, seq, silent) = (view.cache_spec(id), view.last_seq(id), view.is_silent(id));
                workers.push(WorkerRow { id, spec, seq, blocks, silent, heard: None });
            }
        }
    }
    let names = workers.iter().map(|row| labels.get(row.id).map_or("", Label::id));
    let heard = recorder.reports.of(names);
    workers.iter_mut().zip(heard).for_each(|(row, heard)| row.heard = heard);
    if recorder.reports.len() > sizes.workers {
        let view = index.read();
        recorder.reports.keep(|worker_id| view.find_worker(worker_id).is_some());
    }
    Snapshot { sizes, placements, silent, workers, labels, taken: Instant::now() }
}
