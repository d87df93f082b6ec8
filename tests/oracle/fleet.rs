//! Workers that come and go: their ids are used again and nothing of them stays behind.

use sgl_kv_indexer::arena::{Action, Batch};
use sgl_kv_indexer::arena::{Index, PackedHashes, Sizes, Tier};
use sgl_kv_indexer::scan::{PrefixScratch, prefix};

use crate::ops::Pool;

/// Blocks that every worker has.
const SHARED: u32 = 64;

/// Blocks that only it has: more than a clear carries out at once.
const OWN: u32 = 1_100;

/// Workers that are there at a time.
const PRESENT: u32 = 8;

fn report(index: &Index, worker: u32, blocks: std::ops::Range<u32>) {
    let hashes: Vec<i64> = blocks.map(|block| Pool::Random.hash(block)).collect();
    let packed = PackedHashes::pack(&hashes);
    let action = Action::Report {
        tier: Tier::Hbm,
        hashes: PackedHashes::new(&packed).expect("whole hashes"),
        masks: &[],
        tokens: &[],
    };
    let batch = Batch {
        worker_id: &format!("worker-{worker}"),
        worker_address: "http://worker:30000",
        cache_spec: None,
        seq: 0,
        actions: &[action],
    };
    index.apply(&batch).expect("a legal batch");
}

fn own(worker: u32) -> std::ops::Range<u32> {
    let first = SHARED + worker * OWN;
    first..first + OWN
}

fn matches(index: &Index, blocks: std::ops::Range<u32>) -> usize {
    let packed = PackedHashes::pack(&blocks.map(|block| Pool::Random.hash(block)).collect::<Vec<_>>());
    let mut scratch = PrefixScratch::default();
    prefix(&index.read(), PackedHashes::new(&packed).expect("whole hashes"), &mut scratch);
    scratch.matches().len()
}

fn settle(index: &Index) -> Sizes {
    while index.maintain() {}
    index.read().sizes()
}

/// Lets workers come and the oldest go; gives the index's bytes halfway and at the end.
fn come_and_go(index: &Index, workers: u32, settles: bool) -> [usize; 2] {
    let mut bytes = [0; 2];
    for worker in 0..workers {
        report(index, worker, 0..SHARED);
        report(index, worker, own(worker));
        if let Some(oldest) = worker.checked_sub(PRESENT) {
            assert!(index.remove_worker(&format!("worker-{oldest}")), "it is there");
            assert!(!index.remove_worker(&format!("worker-{oldest}")), "it is not there twice");
        }
        if settles {
            settle(index);
        }
        if worker == workers / 2 || worker == workers - 1 {
            let sizes = index.read().sizes();
            bytes[usize::from(worker == workers - 1)] =
                sizes.block_bytes + sizes.table_bytes + sizes.set_bytes + sizes.holding_bytes;
        }
    }
    bytes
}

#[test]
fn ten_thousand_workers_leave_the_footprint_flat() {
    for settles in [false, true] {
        let index = Index::new();
        let [half, whole] = come_and_go(&index, 10_000, settles);
        assert!(whole <= half + half / 4, "{half} bytes halfway, {whole} at the end");
        let view = index.read();
        let highest = view.workers().map(|worker| worker.index()).max().expect("some are left");
        // Those that wait for their clean-up keep their ids; applies clean up more than they report.
        assert!(highest < 8 * PRESENT as usize, "ids up to {highest} for {PRESENT} workers");
        assert_eq!(view.sizes().workers, PRESENT as usize);
        drop(view);
        assert_eq!(matches(&index, 0..SHARED), PRESENT as usize);
        index.audit().expect("the invariants hold");
    }
}

#[test]
fn a_removed_worker_comes_back_with_what_it_reports_anew() {
    let index = Index::new();
    report(&index, 0, 0..SHARED);
    report(&index, 0, own(0));
    assert!(index.remove_worker("worker-0"));
    assert_eq!(matches(&index, 0..SHARED), 0, "gone at once, before any clean-up");
    report(&index, 0, 0..8);
    assert_eq!(matches(&index, 0..SHARED), 1);
    assert_eq!(matches(&index, own(0)), 0, "what it had before does not come back with it");
    let sizes = settle(&index);
    assert_eq!((sizes.workers, sizes.blocks), (1, 8));
    index.audit().expect("the invariants hold");
}

#[test]
fn nothing_is_left_of_the_last_worker() {
    let index = Index::new();
    for worker in 0..200 {
        report(&index, worker, own(worker));
    }
    for worker in 0..200 {
        assert!(index.remove_worker(&format!("worker-{worker}")));
    }
    assert_eq!(index.read().workers().count(), 0);
    let sizes = settle(&index);
    assert_eq!((sizes.workers, sizes.blocks, sizes.sets, sizes.block_bytes), (0, 0, 0, 0));
    report(&index, 7, own(7));
    assert_eq!(index.read().workers().map(|worker| worker.index()).collect::<Vec<_>>(), [0]);
    index.audit().expect("the invariants hold");
}

#[test]
fn who_was_heard_is_neither_silenced_nor_removed() {
    let index = Index::new();
    report(&index, 0, 0..SHARED);
    let (worker, heard) = {
        let view = index.read();
        let worker = view.find_worker("worker-0").expect("it reported");
        (worker, view.heard(worker).expect("it is there"))
    };
    assert!(index.put_silent(worker, heard, true));
    assert_eq!(matches(&index, 0..SHARED), 0);
    report(&index, 0, 0..1);
    assert_eq!(matches(&index, 0..SHARED), 1, "its next batch takes it in again");
    assert!(!index.put_silent(worker, heard, true), "it was heard since");
    assert!(!index.remove_if_unheard(worker, heard), "it was heard since");
    assert_eq!(matches(&index, 0..SHARED), 1);
    let heard = index.read().heard(worker).expect("it is there");
    assert!(index.remove_if_unheard(worker, heard));
    assert_eq!(index.read().heard(worker), None);
    assert!(!index.remove_if_unheard(worker, heard), "it is gone");
}
