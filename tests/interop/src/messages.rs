//! The few messages that are asked and answered here, as serde makes them.

use serde::{Deserialize, Serialize};

#[derive(Debug, Serialize, Deserialize)]
pub struct HealthRequest {}

#[derive(Debug, Serialize, Deserialize)]
pub struct HealthResponse {
    pub healthy: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum ApiRequest {
    RenewLease {
        #[serde(with = "serde_bytes")]
        id: Vec<u8>,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub enum ApiResponse {
    RenewLease(Renewal),
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Renewal {
    Renewed {
        #[serde(with = "serde_bytes")]
        id: Vec<u8>,
        timeout_ms: u64,
    },
    Failed,
}
