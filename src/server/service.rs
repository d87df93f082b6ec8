//! The four calls: admit, translate, call, encode.
//!
//! Requests come decoded and checked, answers leave encoded; what is decided
//! here is only on which thread the work runs. A call takes the index's lock
//! once, keeps what it found and the labels of that moment, and encodes after it
//! has let go. What a message is charged is held as long as the message is worked on.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use tonic::{Request, Response, Status};

use super::admission::{Admission, Deadline, Refusal};
use super::memory::Charge;
use super::observe::{Recorder, ScanTimes};
use super::status::Interrupted;
use super::wire::{self, Answer, ApplyRequest, HitCountsRequest, MatchRequest, PrefixRequest};
use crate::arena::{BatchError, Index, PackedHashes};
use crate::scan::{self, PrefixScratch, lookup};

/// Most hashes that a prefix query scans on the thread that received it.
///
/// The runtime has few threads and each also serves connections. In runs, this
/// many are a comparison of 128 KiB, less than it costs to wake another thread.
/// Looked up one by one at 100 ns each, the worst there is, they take 1.6 ms.
const SCAN_INLINE_HASHES_MAX: usize = 16_384;

/// The same for applies and hit counts, which look up each hash: 0.2 ms at 100 ns.
const LOOKUP_INLINE_HASHES_MAX: usize = 2_048;

/// The same for matches, whose work is hashes times holders: 128 blocks that 256
/// workers hold make an answer of 33,000 rows and 330 kB.
const MATCH_INLINE_HASHES_MAX: usize = 128;

thread_local! {
    /// Working memory of the scans that run on this thread, one at a time.
    static SCRATCH: RefCell<PrefixScratch> = RefCell::default();
}

/// The index behind the four calls.
#[derive(Debug)]
pub(super) struct Indexer {
    index: Arc<Index>,
    admission: Arc<Admission>,
    recorder: Arc<Recorder>,
}

impl Indexer {
    pub(super) fn new(index: Arc<Index>, admission: Arc<Admission>, recorder: Arc<Recorder>) -> Self {
        Indexer { index, admission, recorder }
    }
}

#[tonic::async_trait]
impl super::KVIndexer for Indexer {
    async fn apply(&self, request: Request<ApplyRequest>) -> Result<Response<Answer>, Status> {
        let charge = Charge::of(&request);
        let request = request.into_inner();
        let index = Arc::clone(&self.index);
        let recorder = Arc::clone(&self.recorder);
        let hashes = request.hashes();
        run(hashes <= LOOKUP_INLINE_HASHES_MAX, move || {
            let actions = request.actions();
            let batch = request.batch(&actions);
            index.apply(&batch)?;
            recorder.applied(batch.worker_id, batch.seq, hashes);
            drop(charge);
            Ok::<(), BatchError>(())
        })
        .await??;
        Ok(Response::new(wire::applied()))
    }

    async fn match_blocks(&self, request: Request<MatchRequest>) -> Result<Response<Answer>, Status> {
        let charge = Charge::of(&request);
        let request = request.into_inner();
        let index = Arc::clone(&self.index);
        let inline = request.hashes().len() <= MATCH_INLINE_HASHES_MAX;
        let answer = run(inline, move || {
            let hashes = request.hashes();
            let (found, labels) = {
                let view = index.read();
                (lookup::find_blocks(&view, hashes, request.count_as_hit()), view.labels())
            };
            let found = found.by_worker();
            let answer = wire::block_matches(&found, hashes, &labels);
            drop(charge);
            answer
        });
        Ok(Response::new(answer.await?))
    }

    async fn match_prefix(&self, request: Request<PrefixRequest>) -> Result<Response<Answer>, Status> {
        let deadline = Deadline::of(&request);
        let charge = Charge::of(&request);
        let request = request.into_inner();
        if deadline.has_passed() {
            return Err(self.admission.refuse_late().into());
        }
        let permit = self.admission.admit()?;
        // Lets everything else that arrived be admitted or refused: see `admission`.
        tokio::task::yield_now().await;
        let index = Arc::clone(&self.index);
        let admission = Arc::clone(&self.admission);
        let recorder = Arc::clone(&self.recorder);
        let inline = request.hashes().len() <= SCAN_INLINE_HASHES_MAX;
        let answer = run(inline, move || {
            let answer = prefix(&index, &admission, &recorder, request.hashes(), deadline);
            drop((permit, charge));
            answer
        });
        Ok(Response::new(answer.await??))
    }

    async fn hit_counts(&self, request: Request<HitCountsRequest>) -> Result<Response<Answer>, Status> {
        let charge = Charge::of(&request);
        let request = request.into_inner();
        let index = Arc::clone(&self.index);
        let inline = request.hashes().len() <= LOOKUP_INLINE_HASHES_MAX;
        let answer = run(inline, move || {
            let hashes = request.hashes();
            let counts = lookup::hit_counts(&index.read(), hashes);
            let answer = wire::hit_counts(&counts, hashes);
            drop(charge);
            answer
        });
        Ok(Response::new(answer.await?))
    }
}

/// Scans and encodes, unless the deadline passed while the lock was waited for.
fn prefix(
    index: &Index,
    admission: &Admission,
    recorder: &Recorder,
    hashes: PackedHashes<'_>,
    deadline: Deadline,
) -> Result<Answer, Refusal> {
    SCRATCH.with_borrow_mut(|scratch| {
        let began = Instant::now();
        let scanned = {
            let view = index.read();
            let locked = Instant::now();
            (!deadline.has_passed()).then(|| {
                admission.scanning();
                (scan::prefix(&view, hashes, scratch), view.labels(), locked)
            })
        };
        let (blocks_read, labels, locked) = scanned.ok_or_else(|| admission.refuse_late())?;
        let times = ScanTimes { began, locked, ended: Instant::now() };
        let best = scratch.matches().first().map_or(0, |found| found.blocks);
        recorder.scanned(hashes.len(), best, blocks_read, times);
        Ok(wire::prefix_matches(scratch.matches(), blocks_read, &labels))
    })
}

/// Does `work` here if it is short, else on a thread that may be kept busy.
async fn run<T: Send + 'static>(
    inline: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Interrupted> {
    if inline {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| if error.is_panic() { Interrupted::Panicked } else { Interrupted::Stopped })
}
