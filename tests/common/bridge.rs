//! A bridge in the test's own process, what it sends read back, and a replay socket.

use std::collections::BTreeSet;

use bytes::Bytes;
use sgl_kv_indexer::bridge::config::Config;
use sgl_kv_indexer::bridge::status::{Statuses, StreamStatus};
use sgl_kv_indexer::bridge::{self, RunError};
use sgl_kv_indexer::pb::{ApplyExternalKvBatchRequest, ExternalKvActionType as Type, TierType as Tier};
use sgl_kv_indexer::settings::Settings;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tonic::Code;
use zeromq::{RouterSocket, SocketRecv, SocketSend, ZmqMessage};

use super::publisher::{Event, batch};
use super::server::Recorder;
use super::{PAUSE, TRIES};

/// A bridge that runs in this process.
pub struct Bridge {
    pub stop: oneshot::Sender<()>,
    pub running: JoinHandle<Result<(), RunError>>,
    pub statuses: Statuses,
}

impl Bridge {
    pub fn start(source: &str, server: &str, more: &[(&'static str, &'static str)]) -> Self {
        Bridge::start_with(source, server, more, |_| {})
    }

    pub fn start_with(
        source: &str,
        server: &str,
        more: &[(&'static str, &'static str)],
        configure: impl FnOnce(&mut Config),
    ) -> Self {
        let pairs = [("KV_INDEXER_WORKER_ID", "w0"), ("KV_INDEXER_WORKER_ADDRESS", "http://w0:30000")];
        let settings = Settings::from_pairs(pairs.into_iter().chain(more.iter().copied()));
        let mut config = Config::read(&settings).expect("settings");
        config.servers = server.split(',').map(str::to_owned).collect();
        config.source.endpoint = source.to_owned();
        // Tests that want signs of life ask for them.
        config.idle_report = None;
        configure(&mut config);
        let (stop, stopped) = oneshot::channel();
        let shutdown = async move {
            let _ = stopped.await;
        };
        let bridge = bridge::Bridge::new(vec![config]);
        let statuses = bridge.statuses();
        Bridge { stop, running: tokio::spawn(bridge.run(shutdown)), statuses }
    }

    /// Waits until the stream's status is as wanted.
    pub async fn until(&self, wanted: impl Fn(&StreamStatus) -> bool) -> StreamStatus {
        for _ in 0..TRIES {
            let status = self.statuses.snapshot().remove(0);
            if wanted(&status) {
                return status;
            }
            tokio::time::sleep(PAUSE).await;
        }
        panic!("never came to be: {:?}", self.statuses.snapshot());
    }

    pub async fn stop(self) {
        let _ = self.stop.send(());
        self.running.await.expect("no panic").expect("a clean stop");
    }
}

/// Placements of a plain set at HBM, after an apply.
pub fn apply(held: &mut BTreeSet<i64>, request: &ApplyExternalKvBatchRequest) {
    for action in &request.actions {
        match (action.r#type(), action.tier()) {
            (Type::ActionReport, Tier::TierHbm) => held.extend(&action.hashes),
            (Type::ActionRevoke, Tier::TierHbm) => held.retain(|hash| !action.hashes.contains(hash)),
            (Type::ActionClearAllAtTier, Tier::TierHbm) => held.clear(),
            _ => {}
        }
    }
}

/// Applies until the server has been told of `last`, and returns what it was sent.
pub async fn until_stored(server: &mut Recorder, last: i64) -> Vec<ApplyExternalKvBatchRequest> {
    let mut requests = Vec::new();
    loop {
        let (request, code) = server.next().await;
        let stored = request
            .actions
            .iter()
            .any(|action| action.r#type() == Type::ActionReport && action.hashes.contains(&last));
        if code == Code::Ok {
            requests.push(request);
        }
        if stored && code == Code::Ok {
            return requests;
        }
    }
}

/// Batch `number` of a publisher whose every batch stores the block of that number.
pub fn numbered(number: u64) -> Vec<Bytes> {
    let payload = batch(&[Event::Stored(vec![number.cast_signed()])]);
    vec![Bytes::new(), number.to_be_bytes().to_vec().into(), payload.into()]
}

/// Answers one question to a replay socket with these batches and the end marker; returns what was asked.
pub async fn answer(router: &mut RouterSocket, numbers: &[u64], has_topics: bool) -> u64 {
    let question = router.recv().await.expect("a question").into_vec();
    let [peer, delimiter, start] = &question[..] else { panic!("{question:?}") };
    assert!(delimiter.is_empty());
    let end = vec![Bytes::new(), vec![0xff; 8].into(), Bytes::new()];
    for batch in numbers.iter().map(|number| numbered(*number)).chain([end]) {
        let mut frames = vec![peer.clone(), Bytes::new()];
        frames.extend(batch.into_iter().skip(usize::from(!has_topics)));
        router.send(ZmqMessage::try_from(frames).expect("frames")).await.expect("sent");
    }
    u64::from_be_bytes(start[..].try_into().expect("8 bytes"))
}
