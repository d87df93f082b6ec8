//! What an operator asks and tells: lists in pages, and drops.

use std::collections::BTreeMap;

use sgl_kv_indexer::pb::admin::admin_client::AdminClient;
use sgl_kv_indexer::pb::admin::{DropWorkerRequest, ListWorkersRequest, ListWorkersResponse, StreamState};
use sgl_kv_indexer::pb::{ApplyExternalKvBatchRequest, ExternalKvAction, TierType, WorkerCacheSpec};
use sgl_kv_indexer::server::Config;
use tonic::Code;
use tonic::transport::Channel;

use crate::server::{Running, apply_synchronised, batch, holders, marked};

async fn page(client: &mut AdminClient<Channel>, after: &str, limit: u32) -> ListWorkersResponse {
    let request = ListWorkersRequest { after: after.to_owned(), limit };
    client.list_workers(request).await.expect("a page").into_inner()
}

async fn drop_worker(client: &mut AdminClient<Channel>, worker: &str) -> bool {
    let request = DropWorkerRequest { worker_id: worker.to_owned() };
    client.drop_worker(request).await.expect("an answer").into_inner().existed
}

#[tokio::test]
async fn a_list_says_what_is_known_of_each_worker() {
    let server = Running::start(Config::default()).await;
    let (mut client, mut admin) = (server.client().await, AdminClient::new(server.channel().await));
    assert_eq!(page(&mut admin, "", 0).await, ListWorkersResponse::default());

    let spec = WorkerCacheSpec {
        version: 1,
        components: 3,
        swa_window_tokens: 64,
        full_tier_mask: 6,
        swa_tier_mask: 2,
        mamba_tier_mask: 4,
    };
    let ssd = ExternalKvAction { r#type: 1, tier: 3, hashes: vec![4, 5], ..Default::default() };
    let mut full = ApplyExternalKvBatchRequest { cache_spec: Some(spec), ..batch("full", 7, &[1, 2, 3]) };
    full.actions.push(ssd);
    client.apply_external_kv_batch(marked(full, "synchronising")).await.expect("applied");
    let bare = ApplyExternalKvBatchRequest { worker_address: String::new(), ..batch("bare", 1, &[]) };
    client.apply_external_kv_batch(bare).await.expect("applied");
    let listed = page(&mut admin, "", 0).await;
    assert!(!listed.more);
    let [bare, full] = listed.workers.try_into().expect("two workers");
    assert_eq!((bare.id.as_str(), bare.address.as_str(), bare.cache_spec), ("bare", "", None));
    assert_eq!((bare.blocks.len(), bare.last_seq, bare.stream()), (0, 1, StreamState::Unknown));
    assert_eq!((full.id.as_str(), full.address.as_str()), ("full", "http://full:1"));
    assert_eq!((full.cache_spec, full.last_seq), (Some(spec), 7));
    let blocks: BTreeMap<_, _> = full.blocks.iter().map(|held| (held.tier(), held.blocks)).collect();
    assert_eq!(blocks, [(TierType::TierHbm, 3), (TierType::TierSsd, 2)].into());
    assert_eq!((full.stream(), full.silent), (StreamState::Synchronising, false));
    // Whatever the machine's pace, it was heard within the time that this test has run.
    assert!(full.last_heard_ms.is_some_and(|ms| ms < 600_000), "{:?}", full.last_heard_ms);

    apply_synchronised(&mut client, batch("full", 8, &[])).await;
    let again = page(&mut admin, "bare", 1).await;
    assert_eq!((again.workers[0].last_seq, again.workers[0].stream()), (8, StreamState::Synchronised));
}

#[tokio::test]
async fn pages_lead_through_all_workers_once_and_in_order() {
    let server = Running::start(Config::default()).await;
    let (mut client, mut admin) = (server.client().await, AdminClient::new(server.channel().await));
    let mut ids: Vec<String> = (0..150).map(|number| format!("w{}", number * 7 % 150)).collect();
    for id in &ids {
        client.apply_external_kv_batch(batch(id, 1, &[1])).await.expect("applied");
    }
    ids.sort();
    for (limit, pages) in [(0, 2), (1_000, 1), (149, 2), (75, 2), (40, 4)] {
        let (mut found, mut after) = (Vec::new(), String::new());
        for number in 1..=pages {
            let page = page(&mut admin, &after, limit).await;
            found.extend(page.workers.into_iter().map(|worker| worker.id));
            after.clone_from(found.last().expect("a worker"));
            assert_eq!(page.more, number < pages, "limit {limit}, page {number}");
        }
        assert_eq!(found, ids, "limit {limit}");
    }
    let above = ListWorkersRequest { after: String::new(), limit: 1_001 };
    assert_eq!(admin.list_workers(above).await.unwrap_err().code(), Code::InvalidArgument);
}

#[tokio::test]
async fn a_dropped_worker_is_gone_at_once_and_comes_back_with_a_later_batch() {
    let server = Running::start(Config::default()).await;
    let (mut client, mut admin) = (server.client().await, AdminClient::new(server.channel().await));
    for worker in ["a", "b"] {
        client.apply_external_kv_batch(batch(worker, 1, &[1, 2])).await.expect("applied");
    }
    assert!(drop_worker(&mut admin, "a").await);
    assert_eq!(holders(&mut client, &[1]).await, ["b"]);
    assert!(!drop_worker(&mut admin, "a").await);
    assert!(!drop_worker(&mut admin, "nobody").await);
    let listed = page(&mut admin, "", 0).await;
    assert_eq!(listed.workers.iter().map(|worker| worker.id.as_str()).collect::<Vec<_>>(), ["b"]);

    // Its bridge is told that nothing of its earlier reports is there, once.
    for expected in [Some(&b"new"[..]), None] {
        let answer = client.apply_external_kv_batch(batch("a", 2, &[2])).await.expect("applied");
        let told = answer.metadata().get("kv-indexer-worker").map(|value| value.as_bytes());
        assert_eq!(told, expected);
    }
    // It holds what that batch reports, and nothing of before.
    assert_eq!(holders(&mut client, &[2]).await, ["a", "b"]);
    assert_eq!(holders(&mut client, &[1]).await, ["b"]);
    assert_eq!(page(&mut admin, "", 1).await.workers[0].id, "a");
    assert_eq!(server.series("kv_indexer_workers_removed_total{reason=\"dropped\"}").await, Some(1.0));
    let nameless = admin.drop_worker(DropWorkerRequest::default()).await.unwrap_err();
    assert_eq!(nameless.code(), Code::InvalidArgument);
    let metadata = nameless.metadata().get("kv-indexer-instance").map(|value| value.as_bytes());
    assert_eq!(metadata, Some(server.instance.as_bytes()));
}
