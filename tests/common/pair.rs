//! An index and the oracle side by side: every change goes to both, every answer is compared.

#![allow(dead_code, reason = "each test uses a part")]

use std::collections::BTreeMap;
use std::fmt::Debug;

use sgl_kv_indexer::arena::{Index, PackedHashes, Tuning, WorkerId};
use sgl_kv_indexer::scan::lookup::{BlockMatches, hit_counts, match_blocks};
use sgl_kv_indexer::scan::naive::{BlockRow, NaiveIndex, TierRow, WorkerRow};
use sgl_kv_indexer::scan::{PrefixScratch, prefix};

use crate::ops::{Operation, OwnedBatch, Step, World};

/// What differed, in words.
pub(crate) type Checked = Result<(), String>;

#[derive(Debug, Default)]
pub(crate) struct Pair {
    pub(crate) index: Index,
    pub(crate) naive: NaiveIndex,
    /// Kept between scans, as a server keeps it.
    scratch: PrefixScratch,
}

impl Pair {
    pub(crate) fn new(tuning: Tuning) -> Self {
        Pair { index: Index::with_tuning(tuning), ..Pair::default() }
    }

    pub(crate) fn apply(&mut self, batch: &OwnedBatch) -> Checked {
        let (real, expected) = batch.lend(|batch| (self.index.apply(batch), self.naive.apply(batch)));
        same("apply", &real, &expected)
    }

    pub(crate) fn run(&mut self, world: &World, operation: &Operation) -> Checked {
        match operation {
            Operation::Apply { worker, work } => self.apply(&world.batch(*worker, work)),
            Operation::Fleet { first, count, work } => {
                (*first..first + count).try_for_each(|worker| self.apply(&world.batch(worker, work)))
            }
            Operation::Refused { worker, work, fault } => {
                let batch = world.faulty(*worker, work, *fault);
                self.apply(&batch)?;
                same("refused", &batch.lend(|batch| self.index.apply(batch)).is_err(), &true)
            }
            Operation::Count { prompt } => self.count(&world.prompt(prompt)),
            Operation::Remove { worker } => {
                let name = world.name(*worker);
                same("removed", &self.index.remove_worker(&name), &self.naive.remove_worker(&name))
            }
            Operation::Silence { worker, silent } => {
                let name = world.name(*worker);
                let view = self.index.read();
                let heard = view.find_worker(&name).and_then(|worker| Some((worker, view.heard(worker)?)));
                drop(view);
                self.naive.put_silent(&name, *silent);
                match heard {
                    Some((worker, heard)) => {
                        let stale = self.index.put_silent(worker, heard + 1, *silent);
                        let put = self.index.put_silent(worker, heard, *silent);
                        same("silenced", &(stale, put), &(false, true))
                    }
                    None => Ok(()),
                }
            }
            Operation::Maintain { steps } => {
                for _ in 0..*steps {
                    self.index.maintain();
                }
                Ok(())
            }
        }
    }

    /// Runs the step's operation and asks the step's prompts in every way.
    pub(crate) fn step(&mut self, world: &World, step: &Step) -> Checked {
        self.run(world, &step.operation)?;
        if world.audits_are_cheap() {
            self.audit()?;
        }
        for prompt in &step.prompts {
            let hashes = world.prompt(prompt);
            self.check_prefix(&hashes, prompt.max_blocks)?;
            self.check_blocks(&hashes)?;
            self.check_counts(&hashes)?;
        }
        Ok(())
    }

    /// The index's check of itself.
    pub(crate) fn audit(&self) -> Checked {
        self.index.audit()
    }

    /// Lets put-off work finish; an endless amount of it is a fault.
    pub(crate) fn settle(&self) -> Checked {
        const STEPS_MAX: usize = 10_000_000;
        let settled = (0..STEPS_MAX).any(|_| !self.index.maintain());
        if settled { Ok(()) } else { Err("maintenance finds no end".to_owned()) }
    }

    pub(crate) fn check_prefix(&mut self, hashes: &[i64], max_blocks: u32) -> Checked {
        let considered = match max_blocks {
            0 => hashes,
            limit => &hashes[..hashes.len().min(limit as usize)],
        };
        let packed = PackedHashes::pack(hashes);
        let packed = PackedHashes::new(&packed).expect("whole hashes").first(considered.len());

        let view = self.index.read();
        let labels = view.labels();
        let mut scans = Vec::new();
        for scratch in [&mut self.scratch, &mut PrefixScratch::default()] {
            let read = prefix(&view, packed, scratch);
            let mut rows = Vec::new();
            for row in scratch.matches() {
                let label = labels.get(row.worker).ok_or_else(|| format!("no label for {row:?}"))?;
                rows.push((label.id().to_owned(), label.address().to_owned(), row.blocks));
            }
            scans.push((rows, read));
        }
        drop(view);

        same("two scans of one state", &scans[0], &scans[1])?;
        let (mut rows, read) = scans.swap_remove(0);
        if !rows.is_sorted_by(|a, b| a.2 >= b.2) {
            return Err(format!("not longest first: {rows:?}"));
        }
        rows.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.0.cmp(&b.0)));
        same("prefix", &rows, &self.naive.prefix(considered))?;
        let legal = self.naive.blocks_read(considered);
        if legal.contains(&read) { Ok(()) } else { Err(format!("blocks_read {read} is not in {legal:?}")) }
    }

    pub(crate) fn check_blocks(&self, hashes: &[i64]) -> Checked {
        let packed = PackedHashes::pack(hashes);
        let packed = PackedHashes::new(&packed).expect("whole hashes");
        let view = self.index.read();
        let labels = view.labels();
        let found = match_blocks(&view, packed, false);
        drop(view);

        same("tokens per position", &found.tokens.len(), &hashes.len())?;
        let expected = self.naive.match_blocks(hashes);
        let listed = expected.iter().flat_map(|row| &row.tiers).flat_map(|row| &row.blocks);
        let held: BTreeMap<i64, u32> = listed.map(|block| (block.hash, block.tokens)).collect();
        for (hash, tokens) in hashes.iter().zip(&found.tokens) {
            if !held.contains_key(hash) {
                same("tokens of a block that nobody holds", tokens, &0)?;
            }
        }
        let mut rows = rows_of(&found, hashes, |worker| {
            labels.get(worker).map(|label| (label.id().to_owned(), label.address().to_owned()))
        })?;
        rows.sort_by(|a, b| a.worker_id.cmp(&b.worker_id));
        same("match", &rows, &expected)
    }

    pub(crate) fn check_counts(&self, hashes: &[i64]) -> Checked {
        let packed = PackedHashes::pack(hashes);
        let packed = PackedHashes::new(&packed).expect("whole hashes");
        let counts = hit_counts(&self.index.read(), packed);
        same("hit counts", &counts, &self.naive.hit_counts(hashes))
    }

    /// Looks the blocks up and counts a hit for each that is held.
    pub(crate) fn count(&mut self, hashes: &[i64]) -> Checked {
        let packed = PackedHashes::pack(hashes);
        let packed = PackedHashes::new(&packed).expect("whole hashes");
        match_blocks(&self.index.read(), packed, true);
        self.naive.count_hits(hashes);
        self.check_counts(hashes)
    }
}

fn rows_of(
    found: &BlockMatches,
    hashes: &[i64],
    label: impl Fn(WorkerId) -> Option<(String, String)>,
) -> Result<Vec<WorkerRow>, String> {
    let mut rows = Vec::new();
    for worker in &found.workers {
        let (worker_id, address) =
            label(worker.worker).ok_or_else(|| format!("no label for {:?}", worker.worker))?;
        let mut tiers = Vec::new();
        for tier in &worker.tiers {
            same("masks per position", &tier.masks.len(), &tier.positions.len())?;
            let block = |(position, mask): (&u32, &u32)| BlockRow {
                position: *position,
                hash: hashes[*position as usize],
                mask: *mask,
                tokens: found.tokens[*position as usize],
            };
            let blocks = tier.positions.iter().zip(&tier.masks).map(block).collect();
            tiers.push(TierRow { tier: tier.tier, blocks });
        }
        rows.push(WorkerRow { worker_id, address, tiers });
    }
    Ok(rows)
}

pub(crate) fn same<T: PartialEq + Debug>(what: &str, real: &T, expected: &T) -> Checked {
    if real == expected {
        Ok(())
    } else {
        Err(format!("{what}:\n got      {real:?}\n expected {expected:?}"))
    }
}
