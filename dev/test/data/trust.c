/*
Preloaded by test_longcrawl64.sh: makes libcurl trust the certificate in the file $TEST_CERTIFICATE, that of
the test's server.
*/
#define _GNU_SOURCE
#include <curl/curl.h>
#include <dlfcn.h>
#include <stdlib.h>

CURL* curl_easy_init(void) {
    CURL* (*init)(void) = (CURL * (*)(void)) dlsym(RTLD_NEXT, "curl_easy_init");
    CURL* curl = init();
    if (curl) curl_easy_setopt(curl, CURLOPT_CAINFO, getenv("TEST_CERTIFICATE"));
    return curl;
}
