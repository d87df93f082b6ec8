//! What a process can read of its streams while they are followed.

mod common;

use bytes::Bytes;
use common::bridge::{Bridge, numbered};
use common::publisher::{Event, Publisher, batch};
use common::server::Recorder;
use rmp::encode;
use sgl_kv_indexer::bridge::health::Incomplete;
use tonic::Code;

/// A batch under this number whose one event is a store with these further texts.
fn store(number: u64, texts: &[(&str, &str)], lists: &[(&str, &str)], group: Option<u64>) -> Vec<Bytes> {
    let mut out = Vec::new();
    let write = &mut out;
    encode::write_array_len(write, 2).unwrap();
    encode::write_f64(write, 1.5).unwrap();
    encode::write_array_len(write, 1).unwrap();
    let keys = 2 + texts.len() + lists.len() + usize::from(group.is_some());
    encode::write_map_len(write, keys as u32).unwrap();
    encode::write_str(write, "type").unwrap();
    encode::write_str(write, "BlockStored").unwrap();
    encode::write_str(write, "block_hashes").unwrap();
    encode::write_array_len(write, 1).unwrap();
    encode::write_uint(write, number).unwrap();
    for (key, text) in texts {
        encode::write_str(write, key).unwrap();
        encode::write_str(write, text).unwrap();
    }
    for (key, text) in lists {
        encode::write_str(write, key).unwrap();
        encode::write_array_len(write, 1).unwrap();
        encode::write_str(write, text).unwrap();
    }
    if let Some(group) = group {
        encode::write_str(write, "group_idx").unwrap();
        encode::write_uint(write, group).unwrap();
    }
    vec![Bytes::new(), number.to_be_bytes().to_vec().into(), out.into()]
}

#[tokio::test]
async fn a_status_says_what_its_stream_goes_through() {
    let mut publisher = Publisher::bind("").await;
    let server = Recorder::start(&[]).await;
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[]);
    let first = bridge.statuses.snapshot().remove(0);
    assert_eq!((&*first.worker_id, &*first.worker_address), ("w0", "http://w0:30000"));
    assert_eq!(
        (&*first.endpoint, &*first.servers[0].server),
        (publisher.endpoint.as_str(), server.url().as_str())
    );
    assert_eq!((first.health.connected, first.last_sequence, first.ended), (false, None, None));
    publisher.joined().await;
    bridge.until(|now| now.health.connected).await;

    publisher.send_frames(numbered(0)).await;
    let now = bridge.until(|now| now.last_sequence == Some(0)).await;
    assert_eq!((now.health.batches, now.health.events, now.health.gaps), (1, 1, 0));
    assert_eq!(now.health.incomplete, None);

    publisher.send_frames(numbered(3)).await;
    let now = bridge.until(|now| now.last_sequence == Some(3)).await;
    assert_eq!((now.health.gaps, now.health.missing_batches), (1, 2));
    let since = now.health.incomplete;
    assert!(matches!(since, Some((_, Incomplete::Gap))), "{since:?}");

    publisher.send_frames(numbered(3)).await;
    publisher.send_frames(store(4, &[("medium", "TAPE")], &[], None)).await;
    publisher.send_frames(store(5, &[], &[("component_types", "rnn")], None)).await;
    publisher.send_frames(store(6, &[("kv_cache_spec_kind", "full_attention")], &[], Some(0))).await;
    publisher.send_frames(store(7, &[("kv_cache_spec_kind", "cross_attention")], &[], Some(1))).await;
    publisher.send_frames(vec![Bytes::new(), 8_u64.to_be_bytes().to_vec().into(), vec![0xc1].into()]).await;
    publisher.send_frames(vec![Bytes::from_static(b"one frame")]).await;
    publisher.send_frames(numbered(9)).await;
    let now = bridge.until(|now| now.last_sequence == Some(9)).await;
    let health = &now.health;
    assert_eq!((health.batches, health.events, health.repeats), (7, 6, 1));
    assert_eq!((health.unknown_media, health.unknown_components, health.unknown_groups), (1, 1, 1));
    assert_eq!((health.undecodable_batches, health.foreign_messages), (1, 1));
    assert_eq!(health.incomplete, since, "it tells of the first loss");

    // What is cleared is known.
    let cleared = batch(&[Event::Cleared]);
    publisher.send_frames(vec![Bytes::new(), 10_u64.to_be_bytes().to_vec().into(), cleared.into()]).await;
    bridge.until(|now| now.last_sequence == Some(10) && now.health.incomplete.is_none()).await;
    bridge
        .until(|now| {
            now.servers[0].pending_bytes == 0 && now.servers[0].sent_rpcs > 0 && now.servers[0].failures == 0
        })
        .await;

    publisher.close().await;
    let now = bridge.until(|now| !now.health.connected).await;
    assert_eq!((now.health.disconnects, now.ended), (1, None));
    let statuses = bridge.statuses.clone();
    bridge.stop().await;
    assert_eq!(statuses.snapshot()[0].ended.as_deref(), Some(""));
}

#[tokio::test]
async fn a_server_that_takes_nothing_shows_and_one_that_refuses_ends_the_stream() {
    let mut publisher = Publisher::bind("").await;
    let server =
        Recorder::start(&[Code::Unavailable, Code::Unavailable, Code::Ok, Code::InvalidArgument]).await;
    let bridge = Bridge::start(&publisher.endpoint, &server.url(), &[]);
    // The clear that a bridge begins with is what is not taken.
    let now = bridge.until(|now| now.servers[0].failures > 0).await;
    assert_eq!((now.servers[0].sent_rpcs, now.ended), (0, None));
    bridge.until(|now| now.servers[0].sent_rpcs == 1 && now.servers[0].failures == 0).await;
    publisher.joined().await;
    publisher.send_frames(numbered(0)).await;
    let now = bridge.until(|now| now.ended.is_some()).await;
    assert!(now.ended.is_some_and(|why| why.contains("refused")));
    assert!(!now.health.connected, "nobody follows it");
    bridge.running.await.expect("no panic").expect_err("a refusal");
}
