//! A server, its client, and short ways to make requests and to read answers.

use std::sync::Arc;

use sgl_kv_indexer::arena::Index;
use sgl_kv_indexer::pb::kv_indexer_client::KvIndexerClient;
pub(crate) use sgl_kv_indexer::pb::{
    ApplyExternalKvBatchRequest as Apply, ExternalKvAction as Action, WorkerCacheSpec as Spec,
};
use sgl_kv_indexer::pb::{
    ExternalKvNodeMatch, GetExternalKvHitCountsRequest, HitCountEntry, MatchExternalKvPrefixRequest,
    MatchExternalKvPrefixResponse, MatchExternalKvRequest,
};
use sgl_kv_indexer::server::{Config, serve};
use tokio::net::TcpListener;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

pub(crate) const REPORT: i32 = 1;
pub(crate) const REVOKE: i32 = 2;
pub(crate) const CLEAR: i32 = 3;

pub(crate) const HBM: i32 = 1;
pub(crate) const DRAM: i32 = 2;
pub(crate) const SSD: i32 = 3;

pub(crate) const FULL: u32 = 1;
pub(crate) const SWA: u32 = 2;
pub(crate) const MAMBA: u32 = 4;

/// A spec of these components, at HBM and DRAM.
pub(crate) fn spec(components: u32, swa_window_tokens: u32) -> Option<Spec> {
    let both = 1 << HBM | 1 << DRAM;
    Some(Spec {
        version: 1,
        components,
        swa_window_tokens,
        full_tier_mask: both,
        swa_tier_mask: both,
        mamba_tier_mask: both,
    })
}

pub(crate) fn report(tier: i32, hashes: &[i64], masks: &[u32], sizes: &[u32]) -> Action {
    Action {
        r#type: REPORT,
        tier,
        hashes: hashes.to_vec(),
        component_masks: masks.to_vec(),
        block_sizes: sizes.to_vec(),
    }
}

pub(crate) fn revoke(tier: i32, hashes: &[i64]) -> Action {
    Action { r#type: REVOKE, ..report(tier, hashes, &[], &[]) }
}

pub(crate) fn clear(tier: i32) -> Action {
    Action { r#type: CLEAR, ..report(tier, &[], &[], &[]) }
}

/// A batch of a worker under its usual address, without a spec.
pub(crate) fn batch(worker: &str, actions: &[Action]) -> Apply {
    Apply {
        worker_id: worker.to_owned(),
        seq: 1,
        actions: actions.to_vec(),
        worker_address: format!("http://{worker}"),
        cache_spec: None,
    }
}

/// A server with an index of its own, and a client of it.
pub(crate) struct Served {
    pub(crate) channel: Channel,
    client: KvIndexerClient<Channel>,
}

impl Served {
    /// Serves an empty index.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        tokio::spawn(serve(listener, Config::default(), Arc::new(Index::new()), std::future::pending()));
        let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("an address");
        let channel = endpoint.connect().await.expect("a server");
        let client = KvIndexerClient::new(channel.clone()).max_decoding_message_size(usize::MAX);
        Served { channel, client }
    }

    /// Serves an index after these batches.
    pub(crate) async fn with(batches: &[Apply]) -> Self {
        let mut served = Served::start().await;
        for batch in batches {
            served.apply(batch).await;
        }
        served
    }

    pub(crate) async fn apply(&mut self, batch: &Apply) {
        assert_eq!(self.apply_code(batch).await, Code::Ok, "{batch:?}");
    }

    pub(crate) async fn apply_code(&mut self, batch: &Apply) -> Code {
        code(self.client.apply_external_kv_batch(batch.clone()).await)
    }

    pub(crate) async fn prefix(&mut self, hashes: &[i64], max_blocks: u32) -> MatchExternalKvPrefixResponse {
        let request = MatchExternalKvPrefixRequest { hashes: hashes.to_vec(), max_blocks };
        self.client.match_external_kv_prefix(request).await.expect("an answer").into_inner()
    }

    pub(crate) async fn prefix_code(&mut self, hashes: &[i64], max_blocks: u32) -> Code {
        let request = MatchExternalKvPrefixRequest { hashes: hashes.to_vec(), max_blocks };
        code(self.client.match_external_kv_prefix(request).await)
    }

    /// What is held of the blocks, sorted by worker.
    pub(crate) async fn held(&mut self, hashes: &[i64], count_as_hit: bool) -> Vec<ExternalKvNodeMatch> {
        let request = MatchExternalKvRequest { hashes: hashes.to_vec(), count_as_hit };
        let answer = self.client.match_external_kv(request).await.expect("an answer").into_inner();
        let mut matches = answer.matches;
        matches.sort_by(|one, other| one.worker_id.cmp(&other.worker_id));
        matches
    }

    pub(crate) async fn held_code(&mut self, hashes: &[i64]) -> Code {
        let request = MatchExternalKvRequest { hashes: hashes.to_vec(), count_as_hit: true };
        code(self.client.match_external_kv(request).await)
    }

    pub(crate) async fn counts(&mut self, hashes: &[i64]) -> Vec<HitCountEntry> {
        let request = GetExternalKvHitCountsRequest { hashes: hashes.to_vec() };
        self.client.get_external_kv_hit_counts(request).await.expect("an answer").into_inner().entries
    }

    pub(crate) async fn counts_code(&mut self, hashes: &[i64]) -> Code {
        let request = GetExternalKvHitCountsRequest { hashes: hashes.to_vec() };
        code(self.client.get_external_kv_hit_counts(request).await)
    }

    /// All that can be asked about these blocks, to be compared with what it was before.
    pub(crate) async fn snapshot(&mut self, hashes: &[i64]) -> impl PartialEq + std::fmt::Debug + use<> {
        let mut prefixes = Vec::new();
        for start in 0..hashes.len() {
            prefixes.push(self.prefix(&hashes[start..], 0).await);
        }
        (self.held(hashes, false).await, prefixes, self.counts(hashes).await)
    }
}

fn code<T>(answer: Result<tonic::Response<T>, tonic::Status>) -> Code {
    answer.map_or_else(|status| status.code(), |_| Code::Ok)
}

/// Matches as text: `worker@address HBM[hash/mask/size ..] DRAM[..], worker@..`.
pub(crate) fn text(matches: &[ExternalKvNodeMatch]) -> String {
    let worker = |row: &ExternalKvNodeMatch| {
        let tiers = row.hashes_by_tier.iter().map(|tier| {
            assert_eq!(tier.hashes.len(), tier.component_masks.len());
            assert_eq!(tier.hashes.len(), tier.block_sizes.len());
            let blocks = (0..tier.hashes.len()).map(|at| {
                format!("{}/{}/{}", tier.hashes[at], tier.component_masks[at], tier.block_sizes[at])
            });
            let name = ["", "HBM", "DRAM", "SSD"][tier.tier as usize];
            format!(" {name}[{}]", blocks.collect::<Vec<_>>().join(" "))
        });
        format!("{}@{}{}", row.worker_id, row.address, tiers.collect::<String>())
    };
    matches.iter().map(worker).collect::<Vec<_>>().join(", ")
}

/// Prefixes as text, in the answer's order: `worker=blocks worker=blocks`.
pub(crate) fn prefixes(answer: &MatchExternalKvPrefixResponse) -> String {
    let row = |found: &sgl_kv_indexer::pb::ExternalKvPrefixMatch| {
        format!("{}={}", found.worker_id, found.matched_prefix_blocks)
    };
    answer.matches.iter().map(row).collect::<Vec<_>>().join(" ")
}
