//! What an index has to do to be compared: ours, the plain one, and `smg-radix-tree`.
//!
//! Everything an index needs in a form of its own is made before the clock runs.

use radix_tree::{Config, HolderId, Overlap, OverlapScratch, RadixTree};
use sgl_kv_indexer::arena::{Index, PackedHashes};
use sgl_kv_indexer::scan::{PrefixScratch, prefix};

use crate::workload::base::Base;
use crate::workload::{PLAIN, Prepared, answer, settle, worker_name};

/// One change by one worker.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Store { worker: usize, parent: Option<i64>, hashes: Vec<i64> },
    Remove { worker: usize, hashes: Vec<i64> },
    Clear { worker: usize },
}

/// Worker and leading blocks, longest first, equal ones by worker.
pub(crate) type Rows = Vec<(u32, u32)>;

pub(crate) trait Peer {
    fn name(&self) -> &'static str;

    /// Makes steps ready.
    fn load(&mut self, steps: &[Step]);

    /// Frees what was made of steps.
    fn forget(&mut self) {
        self.load(&[]);
    }

    /// Applies the steps made ready, and returns when all is done.
    fn apply(&mut self);

    /// Makes prompts ready.
    fn take(&mut self, prompts: &[Vec<i64>]);

    /// Answers a prompt made ready, and returns the number of workers in the answer.
    fn ask(&mut self, prompt: usize) -> usize;

    /// The same answer in full.
    fn rows(&mut self, prompt: usize) -> Rows;

    /// Does what questions put off, as a thread of its server would meanwhile.
    fn rest(&mut self) {}
}

pub(crate) fn sorted(mut rows: Rows) -> Rows {
    rows.sort_unstable_by_key(|(worker, blocks)| (u32::MAX - blocks, *worker));
    rows
}

/// Ours.
#[derive(Debug, Default)]
pub(crate) struct Ours {
    index: Index,
    scratch: PrefixScratch,
    ready: Vec<Prepared>,
    prompts: Vec<Vec<i64>>,
    packed: Vec<Vec<u8>>,
}

impl Peer for Ours {
    fn name(&self) -> &'static str {
        "ours"
    }

    fn load(&mut self, steps: &[Step]) {
        self.ready = steps
            .iter()
            .map(|step| match step {
                Step::Store { worker, hashes, .. } => Prepared::report(*worker, hashes, PLAIN),
                Step::Remove { worker, hashes } => Prepared::revoke(*worker, hashes, PLAIN),
                Step::Clear { worker } => Prepared::clear(*worker, PLAIN),
            })
            .collect();
    }

    fn apply(&mut self) {
        self.ready.iter().for_each(|batch| batch.apply(&self.index));
        // What a clear puts off is part of it.
        settle(&self.index);
    }

    fn take(&mut self, prompts: &[Vec<i64>]) {
        self.prompts = prompts.to_vec();
        self.packed = prompts.iter().map(|prompt| PackedHashes::pack(prompt)).collect();
    }

    fn ask(&mut self, prompt: usize) -> usize {
        let view = self.index.read();
        prefix(&view, PackedHashes::new(&self.packed[prompt]).expect("packed"), &mut self.scratch);
        self.scratch.matches().len()
    }

    fn rows(&mut self, prompt: usize) -> Rows {
        answer(&self.index, &self.prompts[prompt])
    }

    fn rest(&mut self) {
        settle(&self.index);
    }
}

/// A map from block to holders.
#[derive(Debug, Default)]
pub(crate) struct Plain {
    base: Base,
    ready: Vec<Step>,
    prompts: Vec<Vec<i64>>,
}

impl Peer for Plain {
    fn name(&self) -> &'static str {
        "hash map"
    }

    fn load(&mut self, steps: &[Step]) {
        self.ready = steps.to_vec();
    }

    fn apply(&mut self) {
        for step in &self.ready {
            match step {
                Step::Store { worker, hashes, .. } => self.base.store(*worker, hashes),
                Step::Remove { worker, hashes } => self.base.remove(*worker, hashes),
                Step::Clear { worker } => self.base.clear(*worker),
            }
        }
    }

    fn take(&mut self, prompts: &[Vec<i64>]) {
        self.prompts = prompts.to_vec();
    }

    fn ask(&mut self, prompt: usize) -> usize {
        self.base.prefix(&self.prompts[prompt]).len()
    }

    fn rows(&mut self, prompt: usize) -> Rows {
        self.base.prefix(&self.prompts[prompt])
    }
}

/// `smg-radix-tree`: chains with runs of interned holder sets.
pub(crate) struct Smg {
    tree: RadixTree,
    holders: Vec<HolderId>,
    scratch: OverlapScratch,
    out: Vec<Overlap>,
    ready: Vec<SmgStep>,
    prompts: Vec<Vec<u64>>,
}

enum SmgStep {
    Store(HolderId, Option<u64>, Vec<(u64, u64)>),
    Remove(HolderId, Vec<u64>),
    Clear(HolderId),
}

impl Default for Smg {
    fn default() -> Self {
        Smg {
            tree: RadixTree::new(Config { max_chain_len: 4_000_000 }),
            holders: Vec::new(),
            scratch: OverlapScratch::default(),
            out: Vec::new(),
            ready: Vec::new(),
            prompts: Vec::new(),
        }
    }
}

impl Smg {
    fn holder(&mut self, worker: usize) -> HolderId {
        while self.holders.len() <= worker {
            self.holders.push(self.tree.create_holder(&worker_name(self.holders.len())));
        }
        self.holders[worker]
    }
}

fn keys(hashes: &[i64]) -> Vec<u64> {
    hashes.iter().map(|hash| *hash as u64).collect()
}

impl Peer for Smg {
    fn name(&self) -> &'static str {
        "smg-radix-tree"
    }

    fn load(&mut self, steps: &[Step]) {
        self.ready = steps
            .iter()
            .map(|step| match step {
                Step::Store { worker, parent, hashes } => SmgStep::Store(
                    self.holder(*worker),
                    parent.map(|hash| hash as u64),
                    keys(hashes).into_iter().map(|hash| (hash, hash)).collect(),
                ),
                Step::Remove { worker, hashes } => SmgStep::Remove(self.holder(*worker), keys(hashes)),
                Step::Clear { worker } => SmgStep::Clear(self.holder(*worker)),
            })
            .collect();
    }

    fn apply(&mut self) {
        for step in &self.ready {
            match step {
                SmgStep::Store(holder, parent, blocks) => {
                    self.tree.store(*holder, *parent, blocks).expect("parents come first");
                }
                SmgStep::Remove(holder, keys) => {
                    self.tree.remove(*holder, keys);
                }
                SmgStep::Clear(holder) => self.tree.clear(*holder),
            }
        }
    }

    fn take(&mut self, prompts: &[Vec<i64>]) {
        self.prompts = prompts.iter().map(|prompt| keys(prompt)).collect();
    }

    fn ask(&mut self, prompt: usize) -> usize {
        self.tree.overlap(&self.prompts[prompt], &mut self.scratch, &mut self.out);
        self.out.len()
    }

    fn rows(&mut self, prompt: usize) -> Rows {
        self.ask(prompt);
        let number = |row: &Overlap| self.holders.iter().position(|holder| *holder == row.holder);
        sorted(self.out.iter().map(|row| (number(row).expect("a known holder") as u32, row.depth)).collect())
    }
}
