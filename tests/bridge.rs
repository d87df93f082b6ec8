//! The bridge between a foreign publisher and a server that records.

mod common;

use std::collections::BTreeSet;
use std::process::Stdio;

use common::bridge::{Bridge, answer, apply, numbered, until_stored};
use common::capture::{Capture, state_of};
use common::publisher::{Event, Publisher, batch};
use common::server::{Recorder, free_address};
use sgl_kv_indexer::bridge::RunError;
use sgl_kv_indexer::pb::{ExternalKvActionType as Type, TierType as Tier, WorkerCacheSpec};
use tonic::Code;
use zeromq::{RouterSocket, Socket};

#[tokio::test]
async fn changes_arrive_in_order_with_address_and_spec_on_every_rpc() {
    let mut publisher = Publisher::bind("kv").await;
    let mut server = Recorder::start(&[]).await;
    let spec = [
        ("SGLANG_KV_EVENT_TOPIC", "kv"),
        ("KV_INDEXER_CACHE_COMPONENTS", "full"),
        ("KV_INDEXER_CLEAR_TIERS", "HBM,DRAM"),
    ];
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &spec);
    assert_eq!(publisher.joined().await, "kv");
    let events = [9, 1].map(|first| Event::Stored(vec![first, first + 1]));
    let [earlier, later] = events;
    publisher.send(batch(&[Event::Cleared, earlier, Event::Cleared, later, Event::Stored(vec![3])])).await;
    publisher.send(batch(&[Event::Removed(vec![2]), Event::Removed(vec![1]), Event::Stored(vec![4])])).await;
    let requests = until_stored(&mut server, 4).await;
    let steps: Vec<(Type, Tier, Vec<i64>)> = requests
        .iter()
        .flat_map(|request| &request.actions)
        .map(|action| (action.r#type(), action.tier(), action.hashes.clone()))
        .collect();
    assert_eq!(
        steps,
        [
            // Of the bridge's own, at every tier, with which the engine's first clear says nothing new.
            (Type::ActionClearAllAtTier, Tier::TierHbm, vec![]),
            (Type::ActionClearAllAtTier, Tier::TierDram, vec![]),
            (Type::ActionClearAllAtTier, Tier::TierSsd, vec![]),
            (Type::ActionReport, Tier::TierHbm, vec![9, 10]),
            (Type::ActionClearAllAtTier, Tier::TierHbm, vec![]),
            (Type::ActionClearAllAtTier, Tier::TierDram, vec![]),
            (Type::ActionReport, Tier::TierHbm, vec![1, 2, 3]),
            (Type::ActionRevoke, Tier::TierHbm, vec![2, 1]),
            (Type::ActionReport, Tier::TierHbm, vec![4]),
        ]
    );
    for (index, request) in requests.iter().enumerate() {
        assert_eq!(request.seq, index as u64 + 1);
        assert_eq!((request.worker_id.as_str(), request.worker_address.as_str()), ("w0", "http://w0:30000"));
        let spec = WorkerCacheSpec {
            version: 1,
            components: 1,
            full_tier_mask: 0b110,
            ..WorkerCacheSpec::default()
        };
        assert_eq!(request.cache_spec, Some(spec));
    }
    let reports = requests.iter().flat_map(|request| &request.actions);
    for report in reports.filter(|action| action.r#type() == Type::ActionReport) {
        assert_eq!(report.block_sizes, vec![16; report.hashes.len()]);
    }
    bridge.stop().await;
}

#[tokio::test]
async fn a_store_of_60_000_blocks_is_split() {
    let mut publisher = Publisher::bind("").await;
    let mut server = Recorder::start(&[]).await;
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[]);
    publisher.joined().await;
    publisher.send(batch(&[Event::Stored((0..60_000).collect())])).await;
    let requests = until_stored(&mut server, 59_999).await;
    let sizes: Vec<usize> = requests
        .iter()
        .filter_map(|request| request.actions.last().map(|action| action.hashes.len()))
        .filter(|hashes| *hashes > 0)
        .collect();
    assert_eq!(sizes, [16_384, 16_384, 16_384, 10_848]);
    bridge.stop().await;
}

#[tokio::test]
async fn a_recorded_stream_arrives_whole() {
    let capture = Capture::read("sglang-plain-small");
    let mut publisher = Publisher::bind("").await;
    let mut server = Recorder::start(&[]).await;
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[("SGLANG_KV_EVENT_TOPIC", "kv-events")]);
    publisher.joined().await;
    for message in &capture.messages {
        publisher.send_frames(message.frames.clone()).await;
    }
    // Neither of these is this stream's, nor is a batch; the last one ends the test.
    let foreign = |topic: &'static str, sequence: u64, payload: Vec<u8>| {
        vec![topic.into(), sequence.to_be_bytes().to_vec().into(), payload.into()]
    };
    let next = capture.messages.len() as u64;
    publisher.send_frames(foreign("kv-events-2", next, batch(&[Event::Cleared]))).await;
    publisher.send_frames(foreign("kv-events", next, vec![0xc1])).await;
    publisher.send_frames(foreign("kv-events", next + 1, batch(&[Event::Stored(vec![7])]))).await;
    let mut held = BTreeSet::new();
    for request in until_stored(&mut server, 7).await {
        apply(&mut held, &request);
    }
    assert!(held.remove(&7));
    let held: BTreeSet<String> = held.iter().map(i64::to_string).collect();
    let (_, expected) = &capture.streams()[0];
    assert_eq!(held, state_of(expected)["GPU"]);
    bridge.stop().await;
}

#[tokio::test]
async fn a_publisher_that_comes_back_is_followed_again() {
    let mut publisher = Publisher::bind("").await;
    let mut server = Recorder::start(&[]).await;
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[]);
    for last in 1..=3 {
        publisher.joined().await;
        publisher.send(batch(&[Event::Stored(vec![last])])).await;
        until_stored(&mut server, last).await;
        publisher = Publisher::bind_at(&publisher.close().await, "").await;
    }
    bridge.stop().await;
}

#[tokio::test]
async fn a_server_that_is_away_is_told_everything_once_it_is_back() {
    let mut publisher = Publisher::bind("").await;
    let mut server = Recorder::start(&[]).await;
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[]);
    publisher.joined().await;
    publisher.send(batch(&[Event::Stored(vec![1])])).await;
    until_stored(&mut server, 1).await;
    let address = server.stop().await;
    for last in 2..=400 {
        publisher.send(batch(&[Event::Removed(vec![last - 1]), Event::Stored(vec![last])])).await;
    }
    let last = bridge.until(|now| now.last_sequence == Some(399)).await;
    assert!(
        !last.servers[0].synchronised || last.servers[0].failures > 0 || last.servers[0].pending_bytes > 0
    );
    let mut server = Recorder::start_at(address, &[]).await;
    // It names no instance, so on a new connection it may be one that knows nothing.
    let now = bridge.until(|now| now.servers[0].synchronisations == 2).await;
    assert!(now.servers[0].synchronised);
    let mut held = BTreeSet::from([99]);
    while held != BTreeSet::from([400]) {
        let (request, _) = server.next().await;
        assert!(request.actions.len() <= 256);
        apply(&mut held, &request);
    }
    bridge.stop().await;
}

#[tokio::test]
async fn an_overload_passes_and_the_same_batch_is_sent_again() {
    let mut publisher = Publisher::bind("").await;
    let mut server = Recorder::start(&[Code::ResourceExhausted, Code::Unavailable]).await;
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[]);
    publisher.joined().await;
    publisher.send(batch(&[Event::Stored(vec![1])])).await;
    let (first, code) = server.next().await;
    assert_eq!(code, Code::ResourceExhausted);
    for expected in [Code::Unavailable, Code::Ok] {
        let (again, code) = server.next().await;
        assert_eq!((again, code), (first.clone(), expected));
    }
    bridge.stop().await;
}

#[tokio::test]
async fn a_contract_error_stops_the_bridge() {
    for code in [Code::InvalidArgument, Code::OutOfRange, Code::Unimplemented] {
        let mut publisher = Publisher::bind("").await;
        // The first RPC is the clear that a bridge begins with.
        let server = Recorder::start(&[Code::Ok, code]).await;
        let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[]);
        publisher.joined().await;
        publisher.send(batch(&[Event::Stored(vec![1])])).await;
        let error = bridge.running.await.expect("no panic").expect_err("a final error");
        assert!(matches!(&error, RunError::Refused(refused) if refused.status.code() == code), "{error}");
    }
}

#[tokio::test]
async fn the_bridge_binds_for_a_publisher_that_connects() {
    let mut server = Recorder::start(&[]).await;
    let source = format!("tcp://{}", free_address());
    let bridge = Bridge::start(&source, &server.url(), &[("SGLANG_KV_EVENT_BIND", "true")]);
    for last in 1..=2 {
        let mut publisher = Publisher::connect(&source, "").await;
        publisher.joined().await;
        publisher.send(batch(&[Event::Stored(vec![last])])).await;
        until_stored(&mut server, last).await;
    }
    bridge.stop().await;
}

#[tokio::test]
async fn what_goes_missing_is_asked_for_until_it_is_whole() {
    for has_topics in [true, false] {
        let mut publisher = Publisher::bind("").await;
        let mut router = RouterSocket::new();
        let replay = router.bind("tcp://127.0.0.1:0").await.expect("bound").to_string();
        let mut server = Recorder::start(&[]).await;
        let bridge = Bridge::start_with(&publisher.endpoint, &server.url(), &[], |config| {
            config.source.replay = Some(replay);
        });
        publisher.joined().await;
        // History up to 2, of which the first answer loses the middle.
        assert_eq!(answer(&mut router, &[0, 2], has_topics).await, 0);
        assert_eq!(answer(&mut router, &[1, 2], has_topics).await, 1);
        until_stored(&mut server, 2).await;
        // 3 to 5 are lost, and the first answer ends early.
        publisher.send_frames(numbered(6)).await;
        assert_eq!(answer(&mut router, &[3], has_topics).await, 3);
        publisher.send_frames(numbered(7)).await;
        assert_eq!(answer(&mut router, &[4, 5, 6], has_topics).await, 4);
        let requests = until_stored(&mut server, 7).await;
        let stored: Vec<i64> = requests
            .iter()
            .flat_map(|request| &request.actions)
            .inspect(|action| assert_eq!(action.r#type(), Type::ActionReport))
            .flat_map(|action| action.hashes.clone())
            .collect();
        assert_eq!(stored, [3, 4, 5, 6, 7]);
        bridge.stop().await;
    }
}

#[tokio::test]
async fn a_worker_that_stays_away_is_withdrawn_once() {
    let mut publisher = Publisher::bind("").await;
    let mut server = Recorder::start(&[]).await;
    let grace = [("KV_INDEXER_WORKER_GRACE_MS", "1")];
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &grace);
    publisher.joined().await;
    publisher.send(batch(&[Event::Stored(vec![1])])).await;
    until_stored(&mut server, 1).await;
    let endpoint = publisher.close().await;
    let (request, _) = server.next().await;
    assert!(request.actions.iter().all(|action| action.r#type() == Type::ActionClearAllAtTier));
    let mut publisher = Publisher::bind_at(&endpoint, "").await;
    publisher.joined().await;
    publisher.send(batch(&[Event::Stored(vec![2])])).await;
    let actions: Vec<Type> =
        until_stored(&mut server, 2).await.iter().flat_map(|r| &r.actions).map(|a| a.r#type()).collect();
    assert_eq!(actions, [Type::ActionReport]);
    bridge.stop().await;
}

#[tokio::test]
async fn https_without_authorities_is_refused() {
    let bridge = Bridge::start("tcp://127.0.0.1:9", "https://localhost:1", &[]);
    let error = bridge.running.await.expect("no panic").expect_err("no authorities");
    assert!(error.to_string().contains("https"), "{error}");
}

async fn until_called(server: &mut Recorder, times: usize) {
    for _ in 0..times {
        server.next().await;
    }
}

fn binary() -> tokio::process::Command {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_kv-indexer-bridge"));
    command.env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command
}

#[tokio::test]
async fn the_binary_exits_by_what_stopped_it() {
    let output = binary().output().await.expect("run");
    let told = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!((output.status.code(), told.lines().count()), (Some(2), 1), "{told}");
    assert!(told.contains("KV_INDEXER_WORKER_ID"), "{told}");

    for (name, value) in [
        ("RUST_LOG", "sgl_kv_indexer=loud"),
        ("KV_INDEXER_LOG_FORMAT", "xml"),
        ("KV_INDEXER_HTTP_ADDR", "on"),
        ("KV_INDEXER_CA_FILE", "for-no-https-server"),
        ("KV_INDEXER_RANK", "-1"),
        ("KV_INDEXER_COPIES", "some"),
        ("KV_INDEXER_WORKER_GRACE_MS", "soon"),
        ("KV_INDEXER_CLEAR_TIERS", "TAPE"),
        ("SGLANG_KV_EVENT_ENDPOINT", "http://h:1"),
    ] {
        let output = binary().env("KV_INDEXER_WORKER_ID", "w0").env(name, value).output().await.expect("run");
        let told = String::from_utf8(output.stderr).expect("UTF-8");
        assert_eq!((output.status.code(), told.lines().count()), (Some(2), 1), "{told}");
        assert!(told.contains(name) && told.contains(value) && told.contains("takes"), "{told}");
    }
    let token = [("KV_INDEXER_WORKER_ID", "w0"), ("KV_INDEXER_TOKEN_FILE", "no-such-file")];
    let output = binary().envs(token).output().await.expect("run");
    let told = String::from_utf8(output.stderr).expect("UTF-8");
    assert_eq!(output.status.code(), Some(2), "{told}");
    assert!(told.lines().last().unwrap_or_default().contains("no-such-file"), "{told}");

    let output = binary().arg("--help").output().await.expect("run");
    let told = String::from_utf8(output.stdout).expect("UTF-8");
    assert_eq!(output.status.code(), Some(0));
    assert!(told.contains("SGLANG_KV_EVENT_ENDPOINT"), "{told}");

    for (code, signal) in [(0, Some("TERM")), (0, Some("INT")), (1, None)] {
        let mut publisher = Publisher::bind("").await;
        // The first RPC is the clear that a bridge begins with.
        let answers = if signal.is_none() { vec![Code::Ok, Code::InvalidArgument] } else { vec![] };
        let mut server = Recorder::start(&answers).await;
        let child = binary()
            .env("KV_INDEXER_WORKER_ID", "w0")
            .env("KV_INDEXER_ENDPOINT", server.url())
            .env("SGLANG_KV_EVENT_ENDPOINT", &publisher.endpoint)
            .spawn()
            .expect("run");
        publisher.joined().await;
        publisher.send(batch(&[Event::Stored(vec![1])])).await;
        until_called(&mut server, 2).await;
        if let (Some(signal), Some(id)) = (signal, child.id()) {
            let mut kill = tokio::process::Command::new("kill");
            assert!(
                kill.args([format!("-{signal}"), id.to_string()]).status().await.expect("kill").success()
            );
        }
        let output = child.wait_with_output().await.expect("ended");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{told}");
        assert_eq!(told.contains("refused"), signal.is_none(), "{told}");
    }
}
