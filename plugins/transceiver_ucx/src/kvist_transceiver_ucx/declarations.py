"""What is used of UCP's C interface, declared for cffi's ABI mode: no compiler and no headers are needed.

Source: ``ucp/api/ucp.h`` and ``ucp_def.h`` of UCX 1.13. Structures end in padding, because later versions append fields
that a mask switches on, and a library reads only those that the mask names.
"""

from __future__ import annotations

import cffi

ffi = cffi.FFI()
ffi.cdef(
    """
typedef signed char ucs_status_t;
typedef void *ucs_status_ptr_t;
typedef struct ucp_context *ucp_context_h;
typedef struct ucp_worker *ucp_worker_h;
typedef struct ucp_ep *ucp_ep_h;
typedef struct ucp_mem *ucp_mem_h;
typedef struct ucp_rkey *ucp_rkey_h;
typedef struct ucp_config ucp_config_t;
typedef struct ucp_address ucp_address_t;

typedef struct {
    uint64_t field_mask, features; size_t request_size; void *request_init, *request_cleanup;
    uint64_t tag_sender_mask; int mt_workers_shared; size_t estimated_num_eps, estimated_num_ppn;
    const char *name; size_t node_local_id; char later[128];
} ucp_params_t;
typedef struct {
    uint64_t field_mask; size_t request_size; int thread_mode; uint64_t memory_types; char name[32]; char later[128];
} ucp_context_attr_t;
typedef struct {
    uint64_t field_mask; int thread_mode; unsigned long cpu_mask[16]; unsigned events; void *user_data;
    int event_fd; uint64_t flags; const char *name; size_t am_alignment; uint64_t client_id; char later[128];
} ucp_worker_params_t;
typedef void (*ucp_err_handler_cb_t)(void *arg, ucp_ep_h ep, ucs_status_t status);
typedef struct { ucp_err_handler_cb_t cb; void *arg; } ucp_err_handler_t;
typedef struct {
    uint64_t field_mask; const ucp_address_t *address; int err_mode; ucp_err_handler_t err_handler;
    void *user_data; unsigned flags; const void *sockaddr; uint32_t addrlen; void *conn_request;
    const char *name; const void *local_sockaddr; uint32_t local_addrlen; char later[128];
} ucp_ep_params_t;
typedef struct {
    uint64_t field_mask; void *address; size_t length; unsigned flags, prot; int memory_type;
    const void *exported_memh_buffer; char later[64];
} ucp_mem_map_params_t;
typedef struct { uint64_t field_mask; void *address; size_t length; int mem_type; char later[64]; } ucp_mem_attr_t;
typedef struct {
    uint32_t op_attr_mask, flags; void *request; void *cb; uint64_t datatype; void *user_data;
    void *reply_buffer; int memory_type; void *recv_info; ucp_mem_h memh; char later[96];
} ucp_request_param_t;
typedef struct { uint64_t recv_attr; ucp_ep_h reply_ep; char later[32]; } ucp_am_recv_param_t;
typedef ucs_status_t (*ucp_am_recv_callback_t)(
    void *arg, const void *header, size_t header_length, void *data, size_t length, const ucp_am_recv_param_t *param);
typedef struct {
    uint64_t field_mask; unsigned id; uint32_t flags; ucp_am_recv_callback_t cb; void *arg; char later[32];
} ucp_am_handler_param_t;

void ucp_get_version(unsigned *, unsigned *, unsigned *);
const char *ucs_status_string(ucs_status_t);
ucs_status_t ucp_config_read(const char *, const char *, ucp_config_t **);
ucs_status_t ucp_config_modify(ucp_config_t *, const char *, const char *);
void ucp_config_release(ucp_config_t *);
ucs_status_t ucp_init_version(unsigned, unsigned, const ucp_params_t *, const ucp_config_t *, ucp_context_h *);
ucs_status_t ucp_context_query(ucp_context_h, ucp_context_attr_t *);
void ucp_cleanup(ucp_context_h);
ucs_status_t ucp_worker_create(ucp_context_h, const ucp_worker_params_t *, ucp_worker_h *);
void ucp_worker_destroy(ucp_worker_h);
ucs_status_t ucp_worker_get_address(ucp_worker_h, ucp_address_t **, size_t *);
void ucp_worker_release_address(ucp_worker_h, ucp_address_t *);
ucs_status_t ucp_worker_get_efd(ucp_worker_h, int *);
ucs_status_t ucp_worker_arm(ucp_worker_h);
unsigned ucp_worker_progress(ucp_worker_h);
ucs_status_t ucp_worker_set_am_recv_handler(ucp_worker_h, const ucp_am_handler_param_t *);
ucs_status_t ucp_ep_create(ucp_worker_h, const ucp_ep_params_t *, ucp_ep_h *);
ucs_status_ptr_t ucp_ep_close_nbx(ucp_ep_h, const ucp_request_param_t *);
ucs_status_ptr_t ucp_ep_flush_nbx(ucp_ep_h, const ucp_request_param_t *);
ucs_status_t ucp_mem_map(ucp_context_h, const ucp_mem_map_params_t *, ucp_mem_h *);
ucs_status_t ucp_mem_unmap(ucp_context_h, ucp_mem_h);
ucs_status_t ucp_mem_query(ucp_mem_h, ucp_mem_attr_t *);
ucs_status_t ucp_rkey_pack(ucp_context_h, ucp_mem_h, void **, size_t *);
void ucp_rkey_buffer_release(void *);
ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h, const void *, ucp_rkey_h *);
void ucp_rkey_destroy(ucp_rkey_h);
ucs_status_ptr_t ucp_put_nbx(ucp_ep_h, const void *, size_t, uint64_t, ucp_rkey_h, const ucp_request_param_t *);
ucs_status_ptr_t ucp_am_send_nbx(
    ucp_ep_h, unsigned, const void *, size_t, const void *, size_t, const ucp_request_param_t *);
ucs_status_t ucp_request_check_status(void *);
void ucp_request_free(void *);
"""
)

# Bits and values of the same headers, by the names there less the prefix.
PARAM_FEATURES, PARAM_MT_WORKERS_SHARED = 1 << 0, 1 << 5
FEATURE_RMA, FEATURE_WAKEUP, FEATURE_AM = 1 << 1, 1 << 4, 1 << 6
ATTR_MEMORY_TYPES = 1 << 2
WORKER_PARAM_THREAD_MODE = 1 << 0
EP_PARAM_REMOTE_ADDRESS, EP_PARAM_ERR_MODE, EP_PARAM_ERR_HANDLER = 1 << 0, 1 << 1, 1 << 2
ERR_MODE_PEER = 1
MEM_MAP_PARAM_ADDRESS, MEM_MAP_PARAM_LENGTH, MEM_MAP_PARAM_FLAGS, MEM_MAP_PARAM_MEMORY_TYPE = 1, 2, 4, 16
MEM_MAP_ALLOCATE = 1 << 1
MEM_ATTR_ADDRESS = 1 << 0
OP_FLAGS, OP_MEMORY_TYPE, OP_MEMH = 1 << 4, 1 << 6, 1 << 8
EP_CLOSE_FORCE = 1 << 0
AM_SEND_EAGER = 1 << 1
AM_HANDLER_ID, AM_HANDLER_FLAGS, AM_HANDLER_CB = 1 << 0, 1 << 1, 1 << 2
AM_WHOLE_MSG = 1 << 0
OK, IN_PROGRESS, ERR_BUSY = 0, 1, -15
#: Pointers in this range are errors, ``UCS_PTR_IS_ERR``.
ERR_LAST = -100
MEMORY_TYPES = {"cpu": 0, "cuda": 1}
