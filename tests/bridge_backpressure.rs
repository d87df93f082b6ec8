//! What a bridge does while its server does not answer: few and full RPCs afterwards, bounded memory
//! meanwhile, and what its publisher had to drop brought back by the replay.

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use common::bridge::{Bridge, numbered, until_stored};
use common::peer::{Answer, Dropping, Replay, listen};
use common::publisher::{Event, Publisher, batch};
use common::server::Recorder;
use common::{PAUSE, TRIES};
use rmp::encode;
use sgl_kv_indexer::bridge::health::Incomplete;
use sgl_kv_indexer::bridge::{CHANGE_BYTES_RATIO, PENDING_BYTES_MAX};
use sgl_kv_indexer::limits::{ACTIONS_PER_APPLY_MAX, HASHES_PER_CALL_MAX};
use sgl_kv_indexer::pb::ExternalKvActionType as Type;

/// Sends batches while an RPC is held, and returns the actions and hashes of each RPC that carries them.
async fn merged(batches: &[Vec<Event>], last: i64) -> Vec<(usize, usize)> {
    let mut publisher = Publisher::bind("").await;
    let mut server = Recorder::start(&[]).await;
    server.hold(true);
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[]);
    // The clear that a bridge begins with is under way from here on.
    server.next().await;
    publisher.joined().await;
    for events in batches {
        publisher.send(batch(events)).await;
    }
    let number = batches.len() as u64 - 1;
    bridge.until(|now| now.last_sequence == Some(number)).await;
    server.hold(false);
    let requests = until_stored(&mut server, last).await;
    bridge.stop().await;
    let hashes = |request: &sgl_kv_indexer::pb::ApplyExternalKvBatchRequest| {
        request.actions.iter().map(|action| action.hashes.len()).sum()
    };
    // The held one is told of a second time where it was held for longer than an attempt may take.
    let sizes = requests.iter().filter(|request| request.seq > 1);
    sizes.map(|request| (request.actions.len(), hashes(request))).collect()
}

#[tokio::test]
async fn batches_that_arrive_during_an_rpc_go_in_as_few_as_the_contract_allows() {
    // Neighbouring stores become one action, split only by the number of hashes.
    let stores: Vec<Vec<Event>> =
        (0..400).map(|number| vec![Event::Stored((number * 100..(number + 1) * 100).collect())]).collect();
    let total = 400 * 100;
    let mut expected = vec![(1, HASHES_PER_CALL_MAX); total / HASHES_PER_CALL_MAX];
    expected.push((1, total % HASHES_PER_CALL_MAX));
    assert_eq!(merged(&stores, total as i64 - 1).await, expected);

    // Stores and removals in turn may not pass each other, so the number of actions splits them.
    let turns: Vec<Vec<Event>> =
        (0..400).map(|number| vec![Event::Removed(vec![number]), Event::Stored(vec![number + 1])]).collect();
    let mut expected = vec![(ACTIONS_PER_APPLY_MAX, ACTIONS_PER_APPLY_MAX); 800 / ACTIONS_PER_APPLY_MAX];
    expected.push((800 % ACTIONS_PER_APPLY_MAX, 800 % ACTIONS_PER_APPLY_MAX));
    assert_eq!(merged(&turns, 400).await, expected);
}

/// Blocks of one large batch.
const BLOCKS: u64 = 60_000;

/// Batches of them that are sent: about three times what waits in a bridge, so that many are dropped.
const SENT: u64 = 100;

/// Batch `number`, a store of many blocks without their tokens.
fn large(number: u64) -> Vec<Bytes> {
    let mut out = Vec::new();
    let write = &mut out;
    encode::write_array_len(write, 2).unwrap();
    encode::write_f64(write, 1.5).unwrap();
    encode::write_array_len(write, 1).unwrap();
    encode::write_array_len(write, 6).unwrap();
    encode::write_str(write, "BlockStored").unwrap();
    encode::write_array_len(write, BLOCKS as u32).unwrap();
    for block in number * BLOCKS..(number + 1) * BLOCKS {
        encode::write_uint(write, block).unwrap();
    }
    encode::write_nil(write).unwrap();
    encode::write_array_len(write, 0).unwrap();
    encode::write_uint(write, 16).unwrap();
    encode::write_nil(write).unwrap();
    vec![Bytes::new(), number.to_be_bytes().to_vec().into(), out.into()]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_publisher_drops_while_the_server_is_silent_is_repaired_or_told() {
    for replays in [true, false] {
        let sent = Arc::new(AtomicU64::new(0));
        let upto = Arc::clone(&sent);
        let replay = Replay::start(move |_, from| Answer {
            batches: (from..upto.load(Ordering::SeqCst)).map(large).collect(),
            ended: true,
        })
        .await;
        let (listener, endpoint) = listen().await;
        let mut server = Recorder::start(&[]).await;
        server.hold(true);
        // More blocks than copies are counted of, so the stream is read as SGLang's is.
        let settings = [("KV_INDEXER_COPIES", "set")];
        let bridge = Bridge::start_with(&endpoint, &server.url(), &settings, |config| {
            config.source.replay = Some(replay.endpoint.clone()).filter(|_| replays);
        });
        let publisher = Dropping::accept(&listener, 4).await;
        // The publisher goes on whatever its subscriber does, until it has dropped a good part.
        let (mut number, mut dropped, mut highest) = (0, 0, 0);
        for _ in 0..TRIES {
            if number < SENT - 1 {
                // Before it is sent, as an engine keeps a batch before it sends it.
                sent.store(number + 1, Ordering::SeqCst);
                dropped += u64::from(!publisher.send(large(number)));
                number += 1;
            }
            let pending = bridge.statuses.snapshot()[0].pending_bytes;
            highest = highest.max(pending);
            if number == SENT - 1 && highest >= PENDING_BYTES_MAX {
                break;
            }
            tokio::time::sleep(PAUSE / 10).await;
        }
        let message = large(SENT - 1)[2].len();
        assert!(dropped > 0 && highest >= PENDING_BYTES_MAX, "{dropped} dropped, {highest} bytes");
        assert!(highest <= PENDING_BYTES_MAX + CHANGE_BYTES_RATIO * message, "{highest} bytes");

        server.hold(false);
        sent.store(SENT, Ordering::SeqCst);
        publisher.send_in_time(large(SENT - 1)).await;
        let last = (SENT * BLOCKS - 1).cast_signed();
        let mut reported: BTreeMap<u64, Vec<i64>> = BTreeMap::new();
        for request in until_stored(&mut server, last).await {
            let reports = request.actions.iter().filter(|action| action.r#type() == Type::ActionReport);
            reported.insert(request.seq, reports.flat_map(|action| action.hashes.clone()).collect());
        }
        let reported: Vec<i64> = reported.into_values().flatten().collect();
        assert!(reported.is_sorted_by(|one, next| one < next), "each block once and in order");
        let now = bridge.until(|now| !now.repairing && now.pending_bytes == 0).await;
        if replays {
            assert!(now.health.repaired_batches >= dropped, "{dropped} dropped: {}", now.health);
            assert_eq!(reported.len() as u64, SENT * BLOCKS);
            assert_eq!((now.health.missing_batches, now.health.incomplete), (0, None));
        } else {
            assert!(now.health.gaps > 0);
            assert_eq!((reported.len() as u64) / BLOCKS, SENT - dropped);
            assert_eq!(now.health.missing_batches, dropped);
            assert!(matches!(now.health.incomplete, Some((_, Incomplete::Gap | Incomplete::JoinedLate))));
        }
        bridge.stop().await;
    }
}

#[tokio::test]
async fn a_server_that_never_answers_does_not_keep_a_bridge_from_stopping() {
    let mut publisher = Publisher::bind("").await;
    let mut server = Recorder::start(&[]).await;
    server.hold(true);
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[]);
    server.next().await;
    publisher.joined().await;
    publisher.send_frames(numbered(0)).await;
    bridge.until(|now| now.pending_bytes > 0).await;
    bridge.stop().await;
}
