//! The four calls and their answers, over a real connection.

use std::sync::Arc;

use sgl_kv_indexer::arena::Index;
use sgl_kv_indexer::pb;
use sgl_kv_indexer::pb::kv_indexer_client::KvIndexerClient;
use sgl_kv_indexer::server::{Config, serve};
use tokio::net::TcpListener;
use tonic::transport::Channel;

const REPORT: i32 = pb::ExternalKvActionType::ActionReport as i32;
const HBM: i32 = pb::TierType::TierHbm as i32;
const SSD: i32 = pb::TierType::TierSsd as i32;

async fn client() -> KvIndexerClient<Channel> {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(serve(listener, Config::default(), Arc::new(Index::new()), std::future::pending()));
    KvIndexerClient::connect(format!("http://{address}")).await.expect("a server")
}

fn report(tier: i32, hashes: &[i64], sizes: &[u32]) -> pb::ExternalKvAction {
    pb::ExternalKvAction {
        r#type: REPORT,
        tier,
        hashes: hashes.to_vec(),
        component_masks: Vec::new(),
        block_sizes: sizes.to_vec(),
    }
}

async fn apply(
    client: &mut KvIndexerClient<Channel>,
    worker: &str,
    address: &str,
    actions: &[pb::ExternalKvAction],
) {
    let request = pb::ApplyExternalKvBatchRequest {
        worker_id: worker.into(),
        seq: 1,
        actions: actions.to_vec(),
        worker_address: address.into(),
        cache_spec: None,
    };
    client.apply_external_kv_batch(request).await.expect("applied");
}

fn row(tier: i32, hashes: &[i64], sizes: &[u32]) -> pb::TierHashes {
    pb::TierHashes {
        tier,
        hashes: hashes.to_vec(),
        component_masks: vec![0; hashes.len()],
        block_sizes: sizes.to_vec(),
    }
}

#[tokio::test]
async fn what_is_reported_is_answered() {
    let mut client = client().await;
    let chain = [report(HBM, &[1, -2, 3], &[16, 16, 0]), report(SSD, &[3], &[])];
    apply(&mut client, "long", "http://long", &chain).await;
    apply(&mut client, "short", "http://short", &[report(HBM, &[1], &[])]).await;
    apply(&mut client, "hidden", "", &[report(HBM, &[1, -2, 3], &[])]).await;

    let query = pb::MatchExternalKvPrefixRequest { hashes: vec![1, -2, 3, 4], max_blocks: 0 };
    let answer = client.match_external_kv_prefix(query).await.expect("an answer").into_inner();
    let found = |worker: &str, blocks| pb::ExternalKvPrefixMatch {
        worker_address: format!("http://{worker}"),
        matched_prefix_blocks: blocks,
        worker_id: worker.into(),
    };
    assert_eq!(answer.matches, [found("long", 3), found("short", 1)]);
    assert_eq!((answer.best_prefix_blocks, answer.blocks_read), (3, 4));

    let query = pb::MatchExternalKvRequest { hashes: vec![9, 3, 1, 3], count_as_hit: true };
    let mut answer = client.match_external_kv(query).await.expect("an answer").into_inner();
    answer.matches.sort_by(|one, other| one.worker_id.cmp(&other.worker_id));
    let node = |worker: &str, address: &str, hashes_by_tier| pb::ExternalKvNodeMatch {
        worker_id: worker.into(),
        address: address.into(),
        hashes_by_tier,
    };
    let expected = [
        node("hidden", "", vec![row(HBM, &[3, 1], &[0, 16])]),
        node("long", "http://long", vec![row(HBM, &[3, 1], &[0, 16]), row(SSD, &[3], &[0])]),
        node("short", "http://short", vec![row(HBM, &[1], &[16])]),
    ];
    assert_eq!(answer.matches, expected);

    let query = pb::GetExternalKvHitCountsRequest { hashes: vec![-2, 1, 9, 1] };
    let answer = client.get_external_kv_hit_counts(query).await.expect("an answer").into_inner();
    assert_eq!(answer.entries, [pb::HitCountEntry { hash: 1, hit_count_total: 1 }]);
}

#[tokio::test]
async fn a_new_address_is_answered_at_once() {
    let mut client = client().await;
    for address in ["http://one", "http://two"] {
        apply(&mut client, "w", address, &[report(HBM, &[1], &[])]).await;
        let query = pb::MatchExternalKvPrefixRequest { hashes: vec![1], max_blocks: 1 };
        let answer = client.match_external_kv_prefix(query).await.expect("an answer").into_inner();
        assert_eq!(answer.matches[0].worker_address, address);
    }
}

#[tokio::test]
async fn calls_too_large_for_the_connections_thread_are_answered_alike() {
    const BLOCKS: i64 = 16_384;
    let mut client = client().await;
    let hashes: Vec<i64> = (0..BLOCKS).collect();
    apply(&mut client, "w", "http://w", &[report(HBM, &hashes, &[])]).await;
    // One more than is scanned inline.
    let asked = (0..=BLOCKS).collect();
    let query = pb::MatchExternalKvPrefixRequest { hashes: asked, max_blocks: 0 };
    let answer = client.match_external_kv_prefix(query).await.expect("an answer").into_inner();
    assert_eq!((i64::from(answer.best_prefix_blocks), i64::from(answer.blocks_read)), (BLOCKS, BLOCKS + 1));
    let query = pb::MatchExternalKvRequest { hashes: hashes.clone(), count_as_hit: true };
    let answer = client.match_external_kv(query).await.expect("an answer").into_inner();
    assert_eq!(answer.matches[0].hashes_by_tier[0].hashes, hashes);
    let query = pb::GetExternalKvHitCountsRequest { hashes };
    let answer = client.get_external_kv_hit_counts(query).await.expect("an answer").into_inner();
    assert!(answer.entries.iter().all(|entry| entry.hit_count_total == 1));
    assert_eq!(answer.entries.len(), BLOCKS as usize);
}
