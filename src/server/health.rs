//! What probes ask: `grpc.health.v1.Health`.
//!
//! The empty string asks for the process: `SERVING` from the start and `NOT_SERVING`
//! once a drain begins. The index's service is `SERVING` from when the server is ready,
//! see `readiness`, to the drain. Statuses and messages are tonic-health's. What is added here is that a watch ends after it
//! has told of the drain: a stream that goes on would hold its connection, and so
//! the drain, until the last moment.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use tonic::codegen::tokio_stream::Stream;
use tonic::server::NamedService;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::pb::health_check_response::ServingStatus as Told;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_health::server::{HealthReporter, HealthService};

use super::memory::OTHER_BYTES_MAX;
use super::readiness::Readiness;

/// The name under which probes ask for the process.
const WHOLE: &str = "";

/// Says of a server and of its service `S` how they are.
#[derive(Debug, Clone)]
pub(super) struct Reporter {
    reporter: HealthReporter,
    index: &'static str,
    /// Whether watches are to end. Set before they are told, and they are told by way of a lock.
    drains: Arc<AtomicBool>,
}

impl Reporter {
    /// The process is up, and its service ready or not.
    pub(super) async fn starting<S: NamedService>(is_ready: bool) -> Self {
        let reporter = Reporter {
            reporter: HealthReporter::new(),
            index: S::NAME,
            drains: Arc::new(AtomicBool::new(false)),
        };
        reporter.tell(WHOLE, ServingStatus::Serving).await;
        let service = if is_ready { ServingStatus::Serving } else { ServingStatus::NotServing };
        reporter.tell(S::NAME, service).await;
        reporter
    }

    /// Says that the service serves once the server is ready.
    pub(super) async fn follow(self, readiness: Arc<Readiness>) {
        readiness.reached().await;
        self.tell(self.index, ServingStatus::Serving).await;
    }

    /// Nothing serves any more.
    pub(super) async fn draining(&self) {
        self.drains.store(true, Ordering::Relaxed);
        for service in [WHOLE, self.index] {
            self.tell(service, ServingStatus::NotServing).await;
        }
    }

    /// The service that answers probes.
    pub(super) fn service(&self) -> HealthServer<Probed> {
        let health = HealthService::from_health_reporter(self.reporter.clone());
        let probed = Probed { health, drains: Arc::clone(&self.drains) };
        HealthServer::new(probed).max_decoding_message_size(OTHER_BYTES_MAX)
    }

    async fn tell(&self, service: &str, status: ServingStatus) {
        self.reporter.set_service_status(service, status).await;
    }
}

/// tonic-health's service, with watches that end.
#[derive(Debug)]
pub(super) struct Probed {
    health: HealthService,
    drains: Arc<AtomicBool>,
}

#[tonic::async_trait]
impl Health for Probed {
    type WatchStream = UntilDrained<<HealthService as Health>::WatchStream>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        self.health.check(request).await
    }

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let drains = Arc::clone(&self.drains);
        Ok(self.health.watch(request).await?.map(|statuses| UntilDrained { statuses, drains, ended: false }))
    }
}

/// Statuses up to the one that tells of the drain, with it.
#[derive(Debug)]
pub(super) struct UntilDrained<S> {
    statuses: S,
    drains: Arc<AtomicBool>,
    ended: bool,
}

impl<S> Stream for UntilDrained<S>
where
    S: Stream<Item = Result<HealthCheckResponse, Status>> + Unpin,
{
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let status = Pin::new(&mut self.statuses).poll_next(context);
        if let Poll::Ready(Some(Ok(response))) = &status {
            self.ended = response.status() != Told::Serving && self.drains.load(Ordering::Relaxed);
        }
        status
    }
}
