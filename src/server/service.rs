//! The four calls: admit, translate, call, encode.
//!
//! Requests come decoded and checked, answers leave encoded; what is decided
//! here is only on which thread the work runs. A call takes the index's lock
//! once, keeps what it found and the labels of that moment, and encodes after it
//! has let go. What a message is charged is held as long as the message is worked on.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use tonic::metadata::MetadataValue;
use tonic::{Request, Response, Status};

use super::admission::{Admission, Deadline, Refusal};
use super::drops::{Drops, Overtaken, Since};
use super::instance::Instance;
use super::memory::Charge;
use super::observe::{Method, Recorder, ScanTimes};
use super::readiness::Stream;
use super::status::Interrupted;
use super::wire::{self, Answer, ApplyRequest, HitCountsRequest, MatchRequest, PrefixRequest};
use crate::arena::{Batch, Index, Outcome, PackedHashes};
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

/// Metadata of an apply's answer, `new` if the worker was not known before this batch: what its bridge
/// reported earlier is not there, as the server is another one or the worker was removed.
const WORKER: &str = "kv-indexer-worker";

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
    drops: Arc<Drops>,
    instance: Instance,
}

impl Indexer {
    pub(super) fn new(
        index: Arc<Index>,
        admission: Arc<Admission>,
        recorder: Arc<Recorder>,
        drops: Arc<Drops>,
        instance: Instance,
    ) -> Self {
        Indexer { index, admission, recorder, drops, instance }
    }
}

#[tonic::async_trait]
impl super::KVIndexer for Indexer {
    async fn apply(&self, request: Request<ApplyRequest>) -> Result<Response<Answer>, Status> {
        let charge = Charge::of(&request);
        let (receipt, stream) = (self.drops.receipt(), Stream::of(request.metadata(), &self.instance));
        let request = request.into_inner();
        let (index, drops) = (Arc::clone(&self.index), Arc::clone(&self.drops));
        let recorder = Arc::clone(&self.recorder);
        let hashes = request.hashes();
        let is_new = run(hashes <= LOOKUP_INLINE_HASHES_MAX, move || {
            let actions = request.actions();
            let batch = request.batch(&actions);
            let is_new = apply(&index, &batch, |worker_id| drops.since(receipt, worker_id))?;
            if is_new.is_some() {
                recorder.applied(&index, &batch, hashes, stream);
            }
            drop(charge);
            Ok::<_, Status>(is_new)
        });
        let mut response = Response::new(wire::applied());
        if is_new.await?? == Some(true) {
            response.metadata_mut().insert(WORKER, MetadataValue::from_static("new"));
        }
        Ok(response)
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
        // Lets all others that arrived be admitted or refused, if not all can be: see `admission`.
        if self.recorder.in_flight(Method::MatchPrefix) > self.admission.limit() as u64 {
            tokio::task::yield_now().await;
        }
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

/// Applies a batch if its worker was not dropped `since` it was received, as told under the
/// lock; says whether the worker is new.
///
/// One that was overtaken is answered as if it had come just before the drop, which took all of
/// it away.
fn apply(
    index: &Index,
    batch: &Batch<'_>,
    since: impl FnOnce(&str) -> Since,
) -> Result<Option<bool>, Status> {
    let mut found = Since::Kept;
    let outcome = index.apply_if(batch, || {
        found = since(batch.worker_id);
        found == Since::Kept
    })?;
    match (outcome, found) {
        (Outcome::Overtaken, Since::Forgotten) => Err(Overtaken.into()),
        (Outcome::Overtaken, _) => Ok(None),
        (Outcome::Known, _) => Ok(Some(false)),
        (Outcome::New, _) => Ok(Some(true)),
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
            (!deadline.has_passed_at(locked)).then(|| {
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
pub(super) async fn run<T: Send + 'static>(
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::task::{Context, Waker};

    use prost::Message;

    use super::super::KVIndexer;
    use super::super::wire::FromWire;
    use super::*;
    use crate::pb::{ApplyExternalKvBatchRequest, ExternalKvAction};

    /// A report of so many blocks of the worker `w`.
    fn report(blocks: i64) -> Request<ApplyRequest> {
        let hashes = (1..=blocks).collect();
        let action = ExternalKvAction { r#type: 1, tier: 1, hashes, ..Default::default() };
        let message = ApplyExternalKvBatchRequest {
            worker_id: "w".to_owned(),
            actions: vec![action],
            ..Default::default()
        };
        Request::new(ApplyRequest::from_wire(message.encode_to_vec().into()).expect("a valid batch"))
    }

    #[test]
    fn a_batch_that_waits_while_its_worker_is_dropped_does_not_bring_it_back() {
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).build();
        let runtime = runtime.expect("a runtime");
        let (index, drops) = (Arc::new(Index::new()), Arc::new(Drops::default()));
        let (admission, recorder) = (Arc::new(Admission::new(1)), Arc::new(Recorder::new()));
        let instance = Instance::random();
        let calls =
            Indexer::new(Arc::clone(&index), admission, Arc::clone(&recorder), Arc::clone(&drops), instance);
        let _entered = runtime.enter();
        for is_dropped in [true, false] {
            runtime.block_on(calls.apply(report(1))).expect("applied");
            // The only thread for long work is busy, so a long batch waits for it.
            let (go_on, held_up) = mpsc::channel::<()>();
            let busy = runtime.spawn_blocking(move || held_up.recv());
            let mut waiting = calls.apply(report(LOOKUP_INLINE_HASHES_MAX as i64 + 1));
            let polled = waiting.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert!(polled.is_pending());
            drops.begin(if is_dropped { "w" } else { "x" });
            assert!(index.remove_worker("w"));
            recorder.dropped("w");
            go_on.send(()).expect("a busy thread");
            runtime.block_on(waiting).expect("an answer");
            runtime.block_on(busy).expect("no panic").expect("told to go on");
            assert_eq!(index.read().find_worker("w").is_none(), is_dropped);
            assert_eq!(recorder.heard(["w"].into_iter())[0].is_none(), is_dropped);
            index.remove_worker("w");
            recorder.dropped("w");
        }
        // Received after the drop, it comes back.
        drops.begin("w");
        runtime.block_on(calls.apply(report(1))).expect("applied");
        assert!(index.read().find_worker("w").is_some());
    }
}
