//! What probes ask: `grpc.health.v1.Health`.
//!
//! The whole server, named by the empty string, and the index's service are
//! `SERVING` from the start and `NOT_SERVING` once a drain begins. Statuses and
//! messages are tonic-health's. What is added here is that a watch ends after it
//! has told of the drain: a stream that goes on would hold its connection, and so
//! the drain, until the last moment.

use std::pin::Pin;
use std::task::{Context, Poll};

use tonic::codegen::tokio_stream::Stream;
use tonic::server::NamedService;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::pb::health_check_response::ServingStatus as Told;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_health::server::{HealthReporter, HealthService};

/// The name under which probes ask for the server as a whole.
const WHOLE: &str = "";

/// Says of a server and of its service `S` how they are.
#[derive(Debug)]
pub(super) struct Reporter {
    reporter: HealthReporter,
    services: [&'static str; 2],
}

impl Reporter {
    /// Everything serves.
    pub(super) async fn serving<S: NamedService>() -> Self {
        let reporter = Reporter { reporter: HealthReporter::new(), services: [WHOLE, S::NAME] };
        reporter.tell(ServingStatus::Serving).await;
        reporter
    }

    /// Nothing serves any more.
    pub(super) async fn draining(&self) {
        self.tell(ServingStatus::NotServing).await;
    }

    /// The service that answers probes.
    pub(super) fn service(&self) -> HealthServer<Probed> {
        HealthServer::new(Probed(HealthService::from_health_reporter(self.reporter.clone())))
    }

    async fn tell(&self, status: ServingStatus) {
        for service in self.services {
            self.reporter.set_service_status(service, status).await;
        }
    }
}

/// tonic-health's service, with watches that end.
#[derive(Debug)]
pub(super) struct Probed(HealthService);

#[tonic::async_trait]
impl Health for Probed {
    type WatchStream = UntilDrained<<HealthService as Health>::WatchStream>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        self.0.check(request).await
    }

    async fn watch(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        Ok(self.0.watch(request).await?.map(|statuses| UntilDrained { statuses, ended: false }))
    }
}

/// Statuses up to the first that is not `SERVING`, with it.
#[derive(Debug)]
pub(super) struct UntilDrained<S> {
    statuses: S,
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
            self.ended = response.status() != Told::Serving;
        }
        status
    }
}
