//! Connections whose client is known once a PROXY header has named it.

use std::net::IpAddr;
use std::sync::Arc;

use super::{ConnectionPermit, Usage};
use crate::http::fair_share::Party;
use crate::idempotency::quota::network;
use crate::telemetry::limits::Limit;

impl Usage {
    /// Acquires a permit for a connection whose PROXY header has yet to name the client, or returns the limit that is
    /// reached.
    pub(in crate::http) fn proxied_connection(&self) -> Result<ConnectionPermit, Limit> {
        let Some(permit) = self.connections.acquire(1) else { return Err(Limit::MaxConnections) };
        Ok(ConnectionPermit { permit, addresses: Arc::clone(&self.addresses), network: None })
    }

    /// Counts the permit's connection for the client at this address, or returns the limit that is reached.
    pub(in crate::http) fn identify(
        &self,
        mut permit: ConnectionPermit,
        ip: IpAddr,
    ) -> Result<ConnectionPermit, Limit> {
        let network = network(ip);
        if permit.network.is_none() {
            if !self.addresses.acquire(network) {
                self.exceeded(Limit::MaxConnectionsPerAddress);
                return Err(Limit::MaxConnectionsPerAddress);
            }
            permit.network = Some(network);
            if !permit.permit.attribute(&|| Party::at(ip)) {
                return Err(Limit::MaxConnections);
            }
        }
        Ok(permit)
    }
}
