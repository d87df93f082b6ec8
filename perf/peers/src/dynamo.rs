//! The three indexes of `dynamo-kv-router`, fed with its events.
//!
//! Its concurrent tree takes events only through a thread of its own, so the
//! time of an apply contains the way there and back, once per list of steps.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread::JoinHandle;

use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent, compute_next_seq_hash,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, PositionalIndexer, RadixTree};
use tokio::sync::oneshot;

use crate::peer::{Peer, Rows, Step, sorted};

/// How far its positional index jumps; what its documentation names.
const JUMP: usize = 32;

/// The sequence hash that its positional index expects of each block.
type Known = HashMap<i64, u64>;

fn events(steps: &[Step], known: &mut Known) -> Vec<RouterEvent> {
    let event = |(number, step): (usize, &Step)| {
        let (worker, data) = match step {
            Step::Store { worker, parent, hashes } => {
                let parent_hash = parent.map(|parent| known[&parent]);
                let mut before = parent_hash;
                let block = |hash: &i64| {
                    let tokens_hash = LocalBlockHash(*hash as u64);
                    let sequence =
                        before.map_or(tokens_hash.0, |before| compute_next_seq_hash(before, tokens_hash));
                    before = Some(sequence);
                    known.insert(*hash, sequence);
                    let block_hash = ExternalSequenceBlockHash(sequence);
                    KvCacheStoredBlockData { block_hash, tokens_hash, mm_extra_info: None }
                };
                let store = KvCacheStoreData {
                    blocks: hashes.iter().map(block).collect(),
                    parent_hash: parent_hash.map(ExternalSequenceBlockHash),
                    start_position: None,
                };
                (*worker, KvCacheEventData::Stored(store))
            }
            Step::Remove { worker, hashes } => {
                let block_hashes = hashes.iter().map(|hash| ExternalSequenceBlockHash(known[hash])).collect();
                (*worker, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
            }
            Step::Clear { worker } => (*worker, KvCacheEventData::Cleared),
        };
        RouterEvent::new(worker as u64, KvCacheEvent { event_id: number as u64, data, dp_rank: 0 })
    };
    steps.iter().enumerate().map(event).collect()
}

fn local(prompts: &[Vec<i64>]) -> Vec<Vec<LocalBlockHash>> {
    prompts.iter().map(|prompt| prompt.iter().map(|hash| LocalBlockHash(*hash as u64)).collect()).collect()
}

fn rows(scores: &OverlapScores) -> Rows {
    sorted(scores.scores.iter().map(|(worker, blocks)| (worker.worker_id as u32, *blocks)).collect())
}

/// Its tree of one block per node.
pub(crate) struct Tree {
    tree: RadixTree,
    ready: Vec<RouterEvent>,
    known: Known,
    prompts: Vec<Vec<LocalBlockHash>>,
}

impl Default for Tree {
    fn default() -> Self {
        Tree { tree: RadixTree::new(), ready: Vec::new(), known: Known::new(), prompts: Vec::new() }
    }
}

impl Peer for Tree {
    fn name(&self) -> &'static str {
        "dynamo radix"
    }

    fn load(&mut self, steps: &[Step]) {
        self.ready = events(steps, &mut self.known);
    }

    fn forget(&mut self) {
        self.ready = Vec::new();
        self.known = Known::new();
    }

    fn apply(&mut self) {
        for event in self.ready.drain(..) {
            self.tree.apply_event(event).expect("parents come first");
        }
    }

    fn take(&mut self, prompts: &[Vec<i64>]) {
        self.prompts = local(prompts);
    }

    fn ask(&mut self, prompt: usize) -> usize {
        self.tree.find_matches(self.prompts[prompt].clone(), false).scores.len()
    }

    fn rows(&mut self, prompt: usize) -> Rows {
        rows(&self.tree.find_matches(self.prompts[prompt].clone(), false))
    }
}

/// An index of its own that is fed by a thread.
pub(crate) struct Fed<T> {
    name: &'static str,
    index: Arc<T>,
    tasks: Option<flume::Sender<WorkerTask>>,
    worker: Option<JoinHandle<()>>,
    ready: Vec<RouterEvent>,
    known: Known,
    prompts: Vec<Vec<LocalBlockHash>>,
}

impl<T: SyncIndexer> Fed<T> {
    fn new(name: &'static str, index: T) -> Self {
        let (tasks, received) = flume::unbounded();
        let index = Arc::new(index);
        let fed = Arc::clone(&index);
        let worker = std::thread::spawn(move || fed.worker(received, None).expect("its worker ends well"));
        Fed {
            name,
            index,
            tasks: Some(tasks),
            worker: Some(worker),
            ready: Vec::new(),
            known: Known::new(),
            prompts: Vec::new(),
        }
    }
}

impl<T> Drop for Fed<T> {
    /// Waits, so that what is freed is not counted for the index that comes next.
    fn drop(&mut self) {
        self.tasks = None;
        self.worker.take().map(JoinHandle::join);
    }
}

/// Its concurrent tree of compressed edges.
pub(crate) fn compressed() -> Fed<ConcurrentRadixTreeCompressed> {
    Fed::new("dynamo compressed", ConcurrentRadixTreeCompressed::new())
}

/// Its map by position and hash.
pub(crate) fn positional() -> Fed<PositionalIndexer> {
    Fed::new("dynamo positional", PositionalIndexer::new(JUMP))
}

impl<T: SyncIndexer> Peer for Fed<T> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn load(&mut self, steps: &[Step]) {
        self.ready = events(steps, &mut self.known);
    }

    fn forget(&mut self) {
        self.ready = Vec::new();
        self.known = Known::new();
    }

    fn apply(&mut self) {
        let Some(last) = self.ready.pop() else { return };
        let tasks = self.tasks.as_ref().expect("until it is dropped");
        for event in self.ready.drain(..) {
            tasks.send(WorkerTask::Event(event)).expect("its worker runs");
        }
        let (resp, done) = oneshot::channel();
        tasks.send(WorkerTask::EventWithAck { event: last, resp }).expect("its worker runs");
        done.blocking_recv().expect("its worker answers");
    }

    fn take(&mut self, prompts: &[Vec<i64>]) {
        self.prompts = local(prompts);
    }

    fn ask(&mut self, prompt: usize) -> usize {
        self.index.find_matches(&self.prompts[prompt], false).scores.len()
    }

    fn rows(&mut self, prompt: usize) -> Rows {
        rows(&self.index.find_matches(&self.prompts[prompt], false))
    }
}
